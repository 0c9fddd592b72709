"""Program of ``test_estimate.py``: peaks of real steps on the CPU, and of fake ones.

``python -m tests.estimate.peaks FOLDER`` prints ``{case: [real bytes, estimated bytes]}``. The real peak is
that of torch's CPU allocator, as the profiler records it: it includes memory inside kernels, which the fake
run cannot see. With FSDP it is the memory of all living tensors: the allocator has more, presumably gloo's
copies of what it reduces. The same holds for convolutions: their kernels on the CPU use more memory.
"""

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from hpcrun.api.submission.choose_config import task_path
from hpcrun.config import Config, override_layer, resolve
from hpcrun.estimate.fake_run import first_batch, trace
from hpcrun.estimate.live_storages import LiveStorages
from hpcrun.ranks.distributed import DistributedConfig
from hpcrun.train.build import build_trainer
from hpcrun.train.data.batching import Batching, accumulation_of
from hpcrun.train.data.micro_batches import MicroBatches
from hpcrun.train.task import Task, load_task

SAMPLES = 4
"""Samples of a micro-batch."""

BYTES = "task=language-model data.max_bytes=1048576 model.context=128 train.batch_size=4"
GPT = f"{BYTES} model.layers=4 model.heads=8 model.width=512"
TWO = "job.gpus=2 train.batch_size=8"
KEEP, FREE = (f"fsdp.reshard_after_forward={value}" for value in ("false", "true"))
SLOW = "model.width=128 model.layers=2"  # A CPU takes seconds for each product in fp16.
HYBRID = "job.nodes=2 job.gpus=2 train.batch_size=16 train.parallel=fsdp fsdp.shard=hybrid"
CASES = {
    "fp32": GPT,
    "bf16-accumulation": f"{GPT} amp.dtype=bf16 train.batch_size=8 train.accumulation=2",
    "bf16-checkpointing": f"{GPT} amp.dtype=bf16 train.activation_checkpointing=full",
    "ddp-accumulation": f"{GPT} job.gpus=2 train.parallel=ddp train.batch_size=16 train.accumulation=2",
    "fsdp-accumulation": f"{GPT} {KEEP} job.gpus=2 train.parallel=fsdp train.batch_size=16 "
    "train.accumulation=2",
    "fsdp-bf16-checkpointing": f"{GPT} {TWO} {FREE} train.parallel=fsdp amp.dtype=bf16 "
    "train.activation_checkpointing=full",
    "fp16": f"{GPT} {SLOW} amp.dtype=fp16",
    "ema": f"{GPT} train.ema=0.9",
    "sgd": f"{GPT} optim.name=sgd",
    "selective-checkpointing": f"{GPT} train.activation_checkpointing=selective",
    "hybrid": f"{GPT} {HYBRID} {FREE}",
    "hybrid-ema-fp16": f"{GPT} {SLOW} {HYBRID} {KEEP} train.ema=0.9 amp.dtype=fp16",
    "bdh": f"{BYTES} model.layers=2 model.heads=4 model.width=128".replace(
        "language-model", "examples.bdh:BDHTask"
    ),
    "tokens": "task=language-model model.layers=2 model.heads=4 model.kv_heads=2 model.width=256 "
    "model.context=128 model.vocabulary=8000 train.batch_size=4 "
    "data.tokens=[FOLDER/tokens.bin]",
    "classifier": "task=examples.classifier:Classifier model.blocks=4 model.channels=64 train.batch_size=64",
    "autoencoder": "task=examples.autoencoder:Autoencoder model.hidden=2048 train.batch_size=512",
}


def config_of(case: str, folder: Path) -> Config:
    """Return the config of a case; most are of a language model with 12.7 million parameters."""
    text = CASES[case].replace("FOLDER", str(folder))
    config = resolve([override_layer(text.split())])
    return config.model_copy(update={"task": task_path(config.task)})


def real(config: Config, task: Task, rank: int) -> int:
    """Return the highest number of bytes in the third step, counted from before the model is built."""
    ranks, gpus = config.job.world_size, config.job.gpus
    place = DistributedConfig(
        world_size=ranks,
        rank=rank,
        local_rank=rank % gpus,
        node_rank=rank // gpus,
        num_nodes=config.job.max_nodes,
        num_gpus_per_node=gpus,
        device_ids=(),
    )
    accumulation = accumulation_of(config, ranks)
    samples = Batching(config.train.batch_size, ranks, accumulation).micro_batch
    parallel: Any = "single" if ranks == 1 else config.train.parallel
    by_tensors = parallel == "fsdp" or "classifier" in config.task
    with (
        LiveStorages(block=1) if by_tensors else contextlib.nullcontext() as live,
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled,
    ):
        trainer = build_trainer(config, task, task.build_model(), place, parallel)
        batches = MicroBatches([first_batch(task, config, samples, print)] * accumulation)
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


def main(folder: Path, chosen: list[str] | None) -> None:
    """Measure all cases, or the ``chosen`` ones, each rank in a separate process."""
    torch.set_num_threads(1)
    os.environ["XDG_CACHE_HOME"] = str(folder)
    peaks: dict[str, list[int]] = {}
    np.zeros(100_000, "<u2").tofile(folder / "tokens.bin")
    for case in CASES if chosen is None else chosen:
        config = config_of(case, folder)
        task, ranks = load_task(config), config.job.world_size
        task.prepare()
        for rank in range(-1, ranks):
            if os.fork() == 0:
                if rank < 0:
                    found = trace(task, config, 1 << 40, lambda _: None, on_gpu=False).peak
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
    main(Path(sys.argv[1]), sys.argv[2:] or None)
