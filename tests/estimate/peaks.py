"""Program of ``test_estimate.py``: peaks of real steps on the CPU, and of fake ones.

``python -m tests.estimate.peaks FOLDER`` prints ``{case: [real bytes, estimated bytes]}``. The real peak is
that of torch's CPU allocator, as the profiler records it: it includes memory inside kernels, which the fake
run cannot see. With FSDP it is the memory of all living tensors: the allocator has more, presumably gloo's
copies of what it reduces.
"""

import contextlib
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from hpcrun.cluster.distributed import DistributedConfig
from hpcrun.config import Config
from hpcrun.estimate.fake_run import FakeRun
from hpcrun.estimate.live_storages import LiveStorages
from hpcrun.train.build import build_trainer
from hpcrun.train.data.batching import Batching, accumulation_of
from hpcrun.train.task import Task, load_task

SAMPLES = 4
"""Samples of a micro-batch."""

# Parallelism, ranks, micro-batches, precision, activation checkpointing.
CASES = {
    "fp32": ("single", 1, 1, "fp32", "none"),
    "bf16-accumulation": ("single", 1, 2, "bf16", "none"),
    "bf16-checkpointing": ("single", 1, 1, "bf16", "full"),
    "ddp-accumulation": ("ddp", 2, 2, "fp32", "none"),
    "fsdp-accumulation": ("fsdp", 2, 2, "fp32", "none"),
    "fsdp-bf16-checkpointing": ("fsdp", 2, 1, "bf16", "full"),
}


def config_of(case: str) -> Config:
    """Return the config of a GPT with 12.7 million parameters."""
    parallel, ranks, accumulation, dtype, checkpointing = CASES[case]
    return Config.model_validate(
        {
            "task": "hpcrun.tasks.language_model:LanguageModel",
            "job": {"gpus": ranks},
            "model": {"layers": 4, "heads": 8, "width": 512, "context": 128},
            "data": {"max_bytes": 1 << 20},
            "train": {
                "parallel": parallel,
                "batch_size": SAMPLES * ranks * accumulation,
                "accumulation": accumulation,
                "activation_checkpointing": checkpointing,
            },
            "amp": {"dtype": dtype},
        }
    )


def real(config: Config, task: Task, rank: int) -> int:
    """Return the highest number of bytes in the third step, counted from before the model is built."""
    ranks = config.job.world_size
    place = DistributedConfig(
        world_size=ranks, rank=rank, local_rank=rank, num_gpus_per_node=ranks, device_ids=()
    )
    accumulation = accumulation_of(config.train, ranks)
    samples = Batching(config.train.batch_size, ranks, accumulation).micro_batch
    sharded = config.train.parallel == "fsdp"
    with (
        LiveStorages(block=1) if sharded else contextlib.nullcontext() as live,
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled,
    ):
        trainer = build_trainer(config, task, task.build_model(), place, config.train.parallel)
        batches = [torch.zeros(samples, 129, dtype=torch.uint8) for _ in range(accumulation)]
        for step in range(3):
            if live is not None:
                live.start()
            with record_function(f"step {step}"):
                trainer.training_step(batches, task.loss)
    if live is not None:
        return live.peak
    events = profiled.profiler.kineto_results.events()
    (begun,) = [event.start_ns() for event in events if event.name() == "step 2"]
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    live = peak = 0
    for when, change in changes:
        live += change
        peak = max(peak, live) if when >= begun else peak
    return peak


def main(folder: Path) -> None:
    """Measure every case in separate processes."""
    torch.set_num_threads(1)
    os.environ["XDG_CACHE_HOME"] = str(folder)
    peaks: dict[str, list[int]] = {}
    for case in CASES:
        config = config_of(case)
        task, ranks = load_task(config), config.job.world_size
        task.prepare()
        for rank in range(-1, ranks):
            if os.fork() == 0:
                if rank < 0:
                    run = FakeRun(task, lambda _: None, on_gpu=False)
                    found = run.trace(config, 1 << 40).peak
                else:
                    if ranks > 1:
                        meeting = f"file://{folder}/{case}"
                        dist.init_process_group(
                            "gloo", init_method=meeting, rank=rank, world_size=ranks
                        )
                    found = real(config, task, rank)
                (folder / f"{case}{rank}.json").write_text(str(found))
                os._exit(0)
        while True:
            try:
                _, status = os.wait()
            except ChildProcessError:
                break
            assert status == 0, case
        peaks[case] = [int((folder / f"{case}{rank}.json").read_text()) for rank in (0, -1)]
    print(json.dumps(peaks))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
