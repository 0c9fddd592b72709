"""Context: the inputs that every builder of a training needs."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn

from hpcrun.config import Config
from hpcrun.devices.accelerator import is_accelerator
from hpcrun.ranks.collective import Ranks
from hpcrun.ranks.distributed import DistributedConfig
from hpcrun.run.directory import RunDirectory
from hpcrun.run.events import Attempt
from hpcrun.train.data.batching import Batching
from hpcrun.train.determinism import explain_refusals
from hpcrun.train.health.out_of_memory import explaining, usage
from hpcrun.train.health.watchdog import At
from hpcrun.train.model.prepare import why_not_recomputed
from hpcrun.train.parallel.choose import Parallel

T = TypeVar("T")


@dataclass(frozen=True)
class Context:
    """The run, attempt, config, place, watchdog, and all ranks (with a control group) of a training."""

    run: RunDirectory
    attempt: Attempt
    config: Config
    distributed: DistributedConfig
    ranks: Ranks
    at: At

    def together(self, compute: Callable[[], T]) -> T:
        """Run ``compute`` on every rank; if it fails on one rank, raise on all of them. Collective."""

        def explained() -> T:
            with explain_refusals():
                return compute()

        return self.ranks.together(explained)

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
