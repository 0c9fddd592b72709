"""A small GPT from a config, built and trained with the functions of a run."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from acceptancelib.outcome import Job
from acceptancelib.world import Member
from hpcrun.api.submission.choose_config import task_path
from hpcrun.config import Config, override_layer, resolve
from hpcrun.train.build import build_trainer
from hpcrun.train.parallel.process_group import control_ranks
from hpcrun.train.setup import make_model
from hpcrun.train.step.trainer import DistributedAMPTrainer
from hpcrun.train.task import Task, load_task

SAMPLES = 4
"""Samples per rank and step."""


def config_of(job: Job, *changes: str) -> Config:
    """Return the config of a small GPT on all ranks, sharded if there are several ranks."""
    wanted = [
        "task=language-model", "model.layers=2", "model.width=64", "model.context=64",
        "job.nodes=1", f"job.gpus={job.ranks}", f"train.batch_size={SAMPLES * job.ranks}",
        "train.steps=100", "optim.warmup_steps=0", "amp.dtype=fp32",
        f"train.parallel={'fsdp' if job.ranks > 1 else 'auto'}",
    ]  # fmt: skip
    config = resolve([override_layer([*wanted, *changes])])
    return config.model_copy(update={"task": task_path(config.task)})


@dataclass(frozen=True)
class SmallRun:
    """A built trainer with its task. ``deferred``: number of parameters that were computed after sharding."""

    config: Config
    task: Task
    trainer: DistributedAMPTrainer
    deferred: int

    def steps(self, count: int) -> list[float]:
        """Take steps with the same bytes, which differ between ranks; return this rank's losses."""
        rank, context = self.trainer.distributed.rank, self.config.model.own["context"]
        made = torch.Generator().manual_seed(rank)
        data = torch.randint(0, 256, (SAMPLES, int(context) + 1), generator=made)
        batch = data.to(self.trainer.device)
        taken = [self.trainer.training_step(batch, self.task.loss) for _ in range(count)]
        return [step.loss.item() for step in taken]

    def bits(self) -> str:
        """Return the hash of all weights, gathered from the ranks. Collective."""
        found = hashlib.sha256()
        for name, value in self.trainer.module.named_parameters():
            found.update(name.encode() + whole(value).view(-1).view(torch.uint8).numpy().tobytes())
        return found.hexdigest()


def ranks(found: Sequence[Any]) -> str:
    """Return the number of results of ranks, in words."""
    return "1 rank" if len(found) == 1 else f"{len(found)} ranks"


def whole(value: Tensor) -> Tensor:
    """Return a value in host memory, gathered from the ranks if it is sharded. Collective."""
    value = value.detach()
    value = value.full_tensor() if isinstance(value, DTensor) else value
    return value.contiguous().cpu()


def build(here: Member, config: Config) -> SmallRun:
    """Build the trainer of ``config`` on the rank of ``here``. Collective."""
    task = load_task(config)
    place = here.distributed
    model, deferred = make_model(task, config, place, control_ranks(place))
    parallel = config.train.parallel
    if parallel == "auto":
        parallel = "single"  # config_of wants this for one rank only
    trainer = build_trainer(config, task, model, here.distributed, parallel, deferred)
    return SmallRun(config, task, trainer, 0 if deferred is None else len(deferred.parameters))
