"""FSDP on all GPUs: a step, a checkpoint, and the same next step after a restore."""

import hashlib
import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpulib.models import adamw, batches, build, next_byte
from gpulib.sizes import SIZES
from torch.distributed.tensor import DTensor

from acceptancelib.outcome import REPORT, Job, Outcome
from acceptancelib.world import Member, run_ranks
from hpcrun.config import AMPConfig
from hpcrun.train.parallel.fsdp import FSDPStrategy
from hpcrun.train.parallel.strategies import Strategy
from hpcrun.train.step.trainer import DistributedAMPTrainer


class _Sharded(DistributedAMPTrainer):
    """A trainer that shards, also with a single rank."""

    def _choose_strategy(self) -> Strategy:
        return FSDPStrategy(self.distributed, self._fsdp, self.amp.dtype)


def check(job: Job) -> list[Outcome]:
    """Compare the step after a restore with the undisturbed step, on every rank."""
    return [judge(run_ranks(job))]


def judge(found: list[dict[str, Any]]) -> Outcome:
    """Return the outcome from the results of the ranks."""
    wrong = []
    for rank, figures in enumerate(found):
        if not all(math.isfinite(loss) for loss in figures["losses"]):
            wrong.append(f"rank {rank} has losses {figures['losses']}")
        if figures["misplaced"]:
            wrong.append(f"rank {rank} has weights on {figures['misplaced']}")
        if figures["save_error"]:
            wrong.append(f"the checkpoint was not written: {figures['save_error']}")
        elif figures["resumed"] != figures["undisturbed"]:
            wrong.append(f"rank {rank} has other weights after the restore and a step")
    details = {"ranks": found}
    if wrong:
        return Outcome("fsdp", "fail", "; ".join(wrong), REPORT, details)
    largest = max(figures["shard"] for figures in found)
    line = f"{len(found)} ranks, {largest:.0%} of the weights on each: "
    line += "the step after a restore has the same bits"
    return Outcome("fsdp", "pass", line, details=details)


def rank(here: Member) -> dict[str, Any]:
    """Take a step, save, take a step; restore into a new trainer, and take the second step again."""
    folder = Path(here.job.folder) / "fsdp"
    data = batches(SIZES["tiny"], torch.device("cpu"), 1)[0]
    # Other bytes on each rank.
    data = ((data + here.distributed.rank) % 256).to(here.device)
    trainer = _trainer(here)
    first = trainer.training_step(data, next_byte)
    saved = trainer.save_checkpoint(folder, 1)
    second = trainer.training_step(data, next_byte)
    local = _locals(trainer)
    figures: dict[str, Any] = {
        "losses": [first.loss.item(), second.loss.item()],
        "misplaced": ", ".join(sorted({str(v.device) for v in local if v.device != here.device})),
        "shard": sum(value.numel() for value in local)
        / sum(parameter.numel() for parameter in trainer.module.parameters()),
        "save_error": "" if saved.ok else str(saved.error),
        "undisturbed": _hash(local),
        "resumed": "",
    }
    if saved.ok:
        again = _trainer(here)
        with torch.no_grad():
            for parameter in again.module.parameters():
                parameter.zero_()
        again.load_checkpoint(folder)
        again.training_step(data, next_byte)
        figures["resumed"] = _hash(_locals(again))
    dist.barrier()
    return figures


def _trainer(here: Member) -> _Sharded:
    trainer = _Sharded(
        build(SIZES["tiny"], torch.device("cpu"), torch.float32),
        adamw,
        distributed=here.distributed,
        parallel="fsdp",
        amp=AMPConfig(dtype="bf16"),
        clip_norm=1.0,
        device=here.device,
    )
    trainer.wrap_model()
    return trainer


def _locals(trainer: _Sharded) -> list[torch.Tensor]:
    parameters = (parameter.detach() for parameter in trainer.module.parameters())
    return [p.to_local() if isinstance(p, DTensor) else p for p in parameters]


def _hash(values: list[torch.Tensor]) -> str:
    found = hashlib.sha256()
    for value in values:
        found.update(value.contiguous().cpu().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
