"""Program of ``test_runs.py``: whole runs, each with one or more attempts of forked ranks.

``python -m tests.train.runs FOLDER`` writes a run directory for each, and ``outcomes.json``, into the folder.
"""

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch._inductor.config

from hpcrun.checkpoint.sharded import copies
from hpcrun.config import override_layer, resolve, to_yaml
from hpcrun.lifecycle.signals import STOP
from hpcrun.run.directory import create
from hpcrun.train import drift, session
from hpcrun.train.deferred.build import Deferred
from hpcrun.train.entry import run_rank
from hpcrun.worker import leave
from tests.train import zoo
from tests.train.forks import fork_ranks

# Modules that every rank would import after the fork: DDP and the deterministic kernels import the compiler.
IMPORTED_ONCE = (session, zoo, torch._dynamo, torch._inductor)
with contextlib.suppress(ImportError):
    import torchao.float8  # noqa: F401  optional

COMMON = [
    "job.gpus=2",
    "job.cpu=true",
    "train.steps=8",
    "train.batch_size=8",
    "train.log_every=2",
    "train.timeout=30",
    "checkpoint.every=3",
    "optim.warmup_steps=2",
]

# Five samples and four, at most three per micro-batch: two micro-batches; an epoch's last batch has three.
UNEVEN = [
    *("train.batch_size=9", "train.micro_batch=3", "train.uneven=pad", "train.ema=0.9"),
    *("train.validate_every=2", "train.patience=100"),
]

# Error feedback begins at the third step, and the loss scale grows after every second step.
POWERSGD = [
    "train.compression=powersgd",
    "train.powersgd_start=2",
    "amp.dtype=fp16",
    "amp.init_scale=64",
    "amp.growth_interval=2",
]

FLOAT8 = ["train.parallel=fsdp", "amp.dtype=bf16", "train.float8=emulate"]

RUNS = {
    "calm": ["task=Regression"],
    "stopped": ["task=Regression", "model.stop_at=5"],
    "calm-exact": ["task=Exact"],
    "other-way": ["task=Exact", "model.stop_at=5"],
    "strict": ["task=Exact", "model.stop_at=5", "train.deterministic=strict"],
    "calm-loaders": [
        *("task=Regression", "data.workers=2", "train.accumulation=2"),
        *("optim.schedule=wsd", "optim.decay_steps=2"),
    ],
    "stopped-loaders": [
        "task=Regression",
        "data.workers=2",
        "train.accumulation=2",
        *("train.steps=30", "optim.schedule=wsd"),
        "model.stop_at=9",
    ],
    "validated": ["task=Validated", "train.validate_every=3"],
    "prepare-refuses": ["task=PrepareRefuses"],
    "prepare-raises": ["task=PrepareRaises"],
    "model-needs-data": ["task=ModelNeedsPreparedData", "data.mark=FOLDER/mark"],
    "dataset-missing": ["task=DatasetMissingOnRank1"],
    "model-raises": ["task=ModelRaisesOnRank1"],
    "no-such-task": ["task=Absent"],
    "nothing-to-validate": ["task=NothingToValidate"],
    "stream": ["task=StreamOfSamples"],
    "calm-stream": ["task=Streaming", "data.workers=2", "train.accumulation=2"],
    "stopped-stream": [
        "task=Streaming",
        "data.workers=2",
        "train.accumulation=2",
        "model.stop_at=9",
    ],
    "calm-own-stream": ["task=StreamingItsOwn"],
    "stopped-own-stream": [
        *("task=StreamingItsOwn", "model.stop_at=5", "train.deterministic=strict"),
    ],
    "best": [
        *("task=Judged", "train.steps=40", "train.validate_every=2", "train.patience=2"),
        *("train.ema=0.5", "checkpoint.keep=1", "checkpoint.keep_best=1"),
    ],
    "calm-uneven": ["task=Ragged", *UNEVEN],
    "stopped-uneven": ["task=Ragged", *UNEVEN, "model.stop_at=9"],
    "calm-fsdp": ["task=ReportsItsWeights", "train.parallel=fsdp", "train.validate_every=3"],
    "stopped-fsdp": [
        "task=ReportsItsWeights",
        "train.parallel=fsdp",
        "train.validate_every=3",
        "model.stop_at=5",
    ],
    "calm-float8": ["task=Wide", *FLOAT8],
    "stopped-float8": ["task=Wide", *FLOAT8, "model.stop_at=5"],
    "float8-on-cpu": ["task=Wide", *FLOAT8, "train.float8=true"],
    "raises-fsdp": ["task=RaisesOnRank1", "train.parallel=fsdp"],
    "killed-restoring": ["task=Regression", "model.stop_at=5"],
    "raises-ddp": ["task=RaisesOnRank1", "train.parallel=ddp"],
    "no-such-class": [
        "task=Regression",
        "train.parallel=fsdp",
        "fsdp.wrap=classes",
        "fsdp.classes=[Layer]",
    ],
    "unused": ["task=HalfUsed"],
    "gives-two": ["task=GivesTwo"],
    "report-raises": ["task=ReportRaises"],
    "report-tensor": ["task=ReportHoldsTensor"],
    "report-killed": [
        *(
            "task=KilledInReport",
            "train.steps=4",
            "train.validate_every=2",
            "restarts.no_progress=2",
        )
    ],
    "exits-with-zero": ["task=ExitsWithZero"],
    "loaders-failure": ["task=FailsWhileLoadersRead", "data.workers=1"],
    "loaders-hang": ["task=FailsWhileALoaderHangs", "data.workers=1"],
    "calm-powersgd": ["task=Regression", *POWERSGD],
    "stopped-powersgd": ["task=Regression", *POWERSGD, "model.stop_at=6"],
    "skips": ["task=NotFiniteOnRank1", "model.bad_from=4", "model.bad_to=5", "amp.dtype=tf32"],
    "not-finite": [
        "task=NotFiniteOnRank1",
        "model.bad_from=4",
        "model.bad_to=99",
        "train.nonfinite_limit=2",
    ],
    "no-number": ["task=WeighsNoNumberOnRank1", "train.nonfinite=stop", "train.steps=4"],
    "watched": [
        "task=Regression",
        "model.stop_at=6",
        "train.profile=2-3",
        "watch.tensorboard=true",
        "watch.peak_flops=1e9",
    ],
    "uploads": ["task=UploadsSlowly", "model.stop_at=5", "watch.wandb=a", "model.folder=FOLDER"],
    "out-of-memory": ["task=RunsOutOfMemory"],
    "hangs": ["task=HangsOnRank1", "train.hang_after=5"],
    "hangs-holding-lock": ["task=HangsOnRank1", "train.hang_after=5", "model.holds_lock=true"],
    "peer-fails": ["task=FailsWhileAPeerIsBlind", "train.hang_after=12"],
    "recompiles": ["task=RecompilesOnRank1", "train.hang_after=5"],
    "few-samples": ["task=FewSamples", "train.batch_size=16"],
    "kernel-prepare": ["task=RefusedKernel", "model.at=prepare"],
    "kernel-backward": ["task=RefusedKernel", "model.at=backward", "data.workers=1"],
    "kernel-rank-1": ["task=RefusedKernel", "model.at=rank-1"],
    "kernel-validation": ["task=RefusedKernel", "model.at=validation"],
    "kernel-warned": ["task=RefusedKernel", "model.at=backward", "train.deterministic=warn"],
}

# Changes that a person makes to a stopped run.
LATER = {
    # Until then the rate was the peak; from step 6 it decays.
    "stopped-loaders": ["train.steps=8", "optim.decay_steps=2"],
    "other-way": [
        *("model.stop_at=99", "train.micro_batch=1", "train.activation_checkpointing=full"),
        *("train.parallel=fsdp", "optim.fused=false"),
    ],
}

# Runs that a restart moves to another environment.
ELSEWHERE = ("stopped", "strict", "stopped-own-stream")
# A run whose first attempt is of a version that recorded no variables.
EARLIER = "stopped-own-stream"

# Started with two ranks, although the config was checked for another number.
MISFITS = {
    "single": ["task=Regression", "job.gpus=1", "train.parallel=single"],
    "too-few": [
        "task=Regression",
        "job.gpus=1",
        "train.batch_size=3",
        "train.accumulation=2",
    ],
}


def count_draws(file: Path) -> None:
    """Append a character to ``file`` whenever rank 0 computes the weights of a deferred build."""
    compute = Deferred.compute

    def counted(self: Deferred, take: Any) -> None:
        with file.open("a") as stream:
            stream.write("!")
        compute(self, take)

    Deferred.compute = counted  # type: ignore[method-assign]


def play(rank: int, run: Path, restart: int) -> None:
    """Run as a task of the local cluster, with its variables, entry point and exit."""
    torch.set_num_threads(1)
    os.environ |= {
        "HPCRUN_LOCAL_CLUSTER": "1",
        "SLURM_JOB_ID": run.name,
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "local0",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0",
        "SLURM_RESTART_COUNT": str(restart),
        "OMP_NUM_THREADS": "1",
    }
    if restart and run.name in ELSEWHERE:
        os.environ["ONEDNN_MAX_CPU_ISA"] = "DEFAULT"
    if not restart and run.name == EARLIER:
        drift.ON_CPUS = ()
    if run.name in ("stopped-fsdp", "stopped-float8") and rank == 0:
        count_draws(run.with_name(f"{run.name}-draws"))
    if run.name == "killed-restoring" and restart and rank == 1:
        # At the first broadcast of what the ranks have read.
        copies.broadcast = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    STOP.install()
    leave(run_rank(run, STOP))


def main(folder: Path) -> None:
    """Run every scenario, again while it asks for a restart, and write its exit codes."""
    outcomes = {}
    for name, overrides in (RUNS | MISFITS).items():
        text = (
            " ".join(overrides)
            .replace("FOLDER", str(folder))
            .replace("task=", "task=tests.train.zoo:")
        )
        config = resolve([override_layer([*COMMON, *text.split()])])
        run = create(folder / name, to_yaml(config), {"created": time.time()})
        logs = folder / f"{name}-logs"
        logs.mkdir()
        began = time.monotonic()
        attempts = []
        while not attempts or attempts[-1] == [75, 75] or attempts[-1][0] == -signal.SIGKILL:
            restart = len(attempts)
            if restart and name in LATER:
                later = override_layer([*COMMON, *text.split(), *LATER[name]])
                run.config.write_text(to_yaml(resolve([later])))
            attempts.append(
                fork_ranks(2, lambda rank, run=run, n=restart: play(rank, run.path, n), logs)
            )
        outcomes[name] = {"codes": attempts, "seconds": time.monotonic() - began}
    (folder / "outcomes.json").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
