"""Context: the inputs that every builder of a training needs."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from hpcrun.cluster.distributed import DistributedConfig
from hpcrun.config import Config
from hpcrun.device.accelerator import is_accelerator
from hpcrun.run.directory import RunDirectory
from hpcrun.run.events import Attempt
from hpcrun.train.data.batching import Batching
from hpcrun.train.health.out_of_memory import explaining, usage
from hpcrun.train.health.watchdog import At
from hpcrun.train.model.prepare import why_not_recomputed
from hpcrun.train.parallel.choose import Parallel
from hpcrun.train.parallel.collective import together

T = TypeVar("T")


@dataclass(frozen=True)
class Context:
    """The run, attempt, config, rank, control group and watchdog of a training.

    ``group``: a control group of all ranks, or None for a single rank.
    """

    run: RunDirectory
    attempt: Attempt
    config: Config
    distributed: DistributedConfig
    group: Any
    at: At

    def together(self, compute: Callable[[], T]) -> T:
        """Run ``compute`` on every rank; if it fails on one rank, raise on all of them. Collective."""
        return together(compute, rank=self.distributed.rank, group=self.group)

    def explain_memory(
        self,
        batching: Batching | None,
        parallel: Parallel,
        device: torch.device,
        model: nn.Module,
    ) -> AbstractContextManager[None]:
        """Add advice to an out-of-memory error in the block; ``batching``: None before the first step."""
        used = usage(
            self.config,
            batching,
            ranks=self.distributed.world_size,
            parallel=parallel,
            gpu=is_accelerator(device),
            recomputable=why_not_recomputed(model, compiled=self.config.train.compile) is None,
        )
        logs = self.run.attempt_logs(self.attempt.job, self.attempt.restart)
        return explaining(used, logs, self.distributed.rank)
