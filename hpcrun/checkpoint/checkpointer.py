"""The engine for any training loop: a folder, a model, an optimizer, and three calls."""

import os
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from hpcrun.checkpoint.engine import CheckpointEngine
from hpcrun.checkpoint.errors import CheckpointError
from hpcrun.checkpoint.interval import EverySeconds, EverySteps, Interval
from hpcrun.checkpoint.outcome import SaveOutcome
from hpcrun.checkpoint.retention import Retention, tidying
from hpcrun.checkpoint.staging import Staging
from hpcrun.checkpoint.state import (
    alike,
    apply_rank,
    apply_shared,
    capture_rank,
    capture_shared,
    template,
)
from hpcrun.checkpoint.store import CheckpointStore
from hpcrun.checkpoint.tier import Stage
from hpcrun.checkpoint.together import Together


class Checkpointer:
    """Saves and restores a training of your own, on one process or on all ranks of torch.distributed.

    Use it as a context manager: leaving the block waits for the save under way. Every method is
    collective: all ranks call it, with the same step.

    Args:
        folder: where the checkpoints lie; made when missing.
        model: bare, in DDP, compiled, or sharded by ``fully_shard``.
        optimizer: made after the model was sharded.
        scaler: a ``GradScaler``, if there is one.
        scheduler: a learning-rate scheduler, if there is one.
        extra: plain data and tensors of your own, read at each save and filled by :meth:`restore`.
        every: steps between saves; 0: only :meth:`save` saves.
        minutes: minutes between saves instead.
        retention: which checkpoints stay.
        stage_dir: a fast folder of this node that a save goes to first, and from there to ``folder``.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        model: nn.Module,
        optimizer: Optimizer,
        scaler: Any = None,
        scheduler: Any = None,
        extra: dict[str, Any] | None = None,
        every: int = 100,
        minutes: float | None = None,
        retention: Retention | None = None,
        stage_dir: Path | str | None = None,
    ) -> None:
        ready = dist.is_available() and dist.is_initialized()
        rank = dist.get_rank() if ready else 0
        world_size = dist.get_world_size() if ready else 1
        group = dist.new_group(backend="gloo") if world_size > 1 else None
        self._model, self._optimizer = model, optimizer
        self._parts = {"scaler": scaler, "scheduler": scheduler}
        self.extra: dict[str, Any] = {} if extra is None else extra
        store = CheckpointStore(Path(folder), _owner())
        pinned = any(parameter.is_cuda for parameter in model.parameters())
        self._engine = CheckpointEngine(
            store,
            rank=rank,
            world_size=world_size,
            group=group,
            still_mine=_nobody_else,
            tidy=tidying(store, retention or Retention()),
            staging=Staging(
                ranks_on_host=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
                pinned=pinned,
            ),
            stage=None if stage_dir is None else Stage(Path(stage_dir)),
        )
        self._interval: Interval = EverySteps(every)
        if minutes is not None:
            self._interval = EverySeconds(lambda: 60.0 * minutes, Together(rank, world_size, group))
        self._started: int | None = None
        self.notes: tuple[str, ...] = ()
        """What the last restore had to say: damaged files passed over, another number of ranks."""
        self.outcome: SaveOutcome | None = None
        """How the last save ended that is known of."""

    def restore(self) -> int:
        """Load the newest whole checkpoint, and return how many steps were done: 0 without any.

        Model, optimizer, scaler, scheduler and ``extra`` are as they were, and on the same number of
        ranks the random generators too: call it after loaders have been made.

        Raises:
            CheckpointError: there are checkpoints and none is whole, or the newest does not fit.
        """
        restored = self._engine.restore(template(self._model, self._optimizer))
        if restored is None:
            return 0
        extra = apply_shared(restored.shared, self._model, self._optimizer, **self._parts)
        self.extra.clear()
        self.extra.update(extra)
        self.notes = restored.notes
        if restored.own is not None:
            self.notes += tuple(apply_rank(restored.own))
        self._started = restored.step
        return restored.step

    def maybe_save(self, step: int) -> bool:
        """Save beside the training if it is time, after ``step`` steps; returns whether it was.

        A save that fails is told by ``outcome`` and a warning, and made good by the next.
        """
        self._take(self._engine.poll())
        if not self._interval.due(step):
            return False
        self.save(step)
        return True

    def save(self, step: int) -> None:
        """Save the state after ``step`` steps beside the training, unless it is saved already."""
        if step == self._started:
            return
        shared = capture_shared(self._model, self._optimizer, **self._parts, extra=self.extra)
        self._engine.start(step, shared, capture_rank(), {"step": step}, alike(self._model))
        self._started = step

    def wait(self) -> SaveOutcome | None:
        """Wait for the save under way; returns how the last one ended.

        Raises:
            CheckpointError: it failed. On all ranks.
        """
        self._take(self._engine.wait())
        if self.outcome is not None and not self.outcome.ok:
            raise CheckpointError(f"step {self.outcome.step} was not saved: {self.outcome.error}")
        return self.outcome

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.wait()
        # Otherwise a peer may be gone, and waiting for it would hide the error; what is under way is
        # committed whole or not at all.

    def _take(self, outcomes: list[SaveOutcome]) -> None:
        for outcome in outcomes:
            self.outcome = outcome
            if not outcome.ok:
                self._started = None if self._started == outcome.step else self._started


def _owner() -> str:
    job = os.environ.get("SLURM_JOB_ID") or os.environ.get("TORCHELASTIC_RUN_ID") or "0"
    restart = os.environ.get("SLURM_RESTART_COUNT") or os.environ.get("TORCHELASTIC_RESTART_COUNT")
    plain = "".join(letter if letter.isalnum() else "-" for letter in job).strip("-") or "0"
    return f"{plain}-{restart or 0}"


def _nobody_else() -> None:
    """Outside a run directory nothing could tell of a newer incarnation."""
