"""The engine for any training loop: a folder, a model, an optimizer, and three calls."""

import os
import re
import secrets
import warnings
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from hpcrun.checkpoint.buffers import apply_buffers, broadcast, capture_buffers
from hpcrun.checkpoint.engine import CheckpointEngine
from hpcrun.checkpoint.errors import CheckpointError, CheckpointWarning
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
        self._together = Together(rank, world_size, group)
        self._model, self._optimizer = model, optimizer
        self._parts = {"scaler": scaler, "scheduler": scheduler}
        self.extra: dict[str, Any] = {} if extra is None else extra
        store = self._store = CheckpointStore(Path(folder), _owner())
        pinned = any(parameter.is_cuda for parameter in model.parameters())
        self._engine = CheckpointEngine(
            store,
            rank=rank,
            world_size=world_size,
            group=group,
            still_mine=_nobody_else,
            tidy=tidying(store, retention or Retention()),
            staging=Staging(
                ranks_on_host=self._together.on_this_host(),
                pinned=pinned,
            ),
            stage=None if stage_dir is None else Stage(Path(stage_dir)),
        )
        self._interval: Interval = EverySteps(every)
        if minutes is not None:
            self._interval = EverySeconds(lambda: 60.0 * minutes, self._together)
        # Only what all ranks learn at the same call decides whether to save: not what `poll` tells.
        self._begun = False
        self._asked: int | None = None
        self._saved: int | None = None
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
        self._take(self._engine.wait())
        self._begun = True
        restored = self._engine.restore(template(self._model, self._optimizer))
        if restored is None:
            return 0
        extra = apply_shared(restored.shared, self._model, self._optimizer, **self._parts)
        self.extra.clear()
        self.extra.update(extra)
        self.notes = restored.notes
        if restored.own is not None:
            if "buffers" in restored.own and not broadcast(self._model):
                apply_buffers(restored.own["buffers"], self._model)
            self.notes += tuple(apply_rank(restored.own))
        self._asked = self._saved = restored.step
        return restored.step

    def maybe_save(self, step: int) -> bool:
        """Save beside the training if it is time, after ``step`` steps; returns whether it was.

        A save that fails is told by ``outcome`` and a warning, and made good by the next.
        """
        self._take(self._engine.poll())
        if not self._interval.due(step) or step == self._asked:
            return False
        self.save(step)
        return True

    def save(self, step: int) -> None:
        """Save the state after ``step`` steps beside the training, unless it is saved already.

        Raises:
            CheckpointError: the state is not plain data; or, on all ranks, checkpoints were there
                before and :meth:`restore` was not called.
        """
        if not self._begun:
            self._together.from_rank_0(self._require_none)
            self._begun = True
        if step == self._asked:
            self._take(self._engine.wait())
            if step == self._saved:
                return
        shared: dict[str, Any] = {}
        trouble: Exception | None = None
        try:
            shared = capture_shared(self._model, self._optimizer, **self._parts, extra=self.extra)
        except Exception as error:  # the others may have none, and would wait
            trouble = error
        own = capture_rank()
        if self._together.world_size > 1 and not broadcast(self._model):
            own["buffers"] = capture_buffers(self._model)
        self._engine.start(step, shared, own, {"step": step}, alike(self._model), trouble)
        self._asked = step
        if trouble is not None:
            raise trouble

    def wait(self) -> SaveOutcome | None:
        """Wait for the save under way; returns how the last one ended.

        Raises:
            CheckpointError: it failed. On all ranks.
        """
        ended = self._engine.wait()
        self._take(ended[:-1])
        for last in ended[-1:]:
            self._note(last)
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
        elif self._together.world_size == 1:
            self._take(self._engine.wait())
        # Otherwise a peer may be gone, and waiting for it would hide the error; what is under way is
        # committed whole or not at all.

    def _require_none(self) -> None:
        # A step that is there already is kept and not written again: those of another training would stay.
        steps: list[int] = []
        with suppress(CheckpointError):  # what cannot be listed the save itself will tell
            steps = self._store.steps()
        if steps:
            raise CheckpointError(
                f"{self._store.root}: holds checkpoints up to step {steps[0]}, which this training did "
                "not go on from; call restore() first, or use another folder"
            )

    def _take(self, outcomes: list[SaveOutcome]) -> None:
        for outcome in outcomes:
            self._note(outcome)
            if not outcome.ok and self._together.rank == 0:
                text = f"step {outcome.step} was not saved: {outcome.error}"
                warnings.warn(text, CheckpointWarning, stacklevel=3)

    def _note(self, outcome: SaveOutcome) -> None:
        self.outcome = outcome
        if outcome.ok:
            self._saved = outcome.step


def _owner() -> str:
    job = os.environ.get("SLURM_JOB_ID") or os.environ.get("TORCHELASTIC_RUN_ID") or "0"
    restart = os.environ.get("SLURM_RESTART_COUNT") or os.environ.get("TORCHELASTIC_RESTART_COUNT")
    plain = re.sub("[^A-Za-z0-9]", "-", job)[:64].strip("-") or "0"
    # Outside a scheduler two processes by mistake at once would write one draft, each half of it.
    return f"{plain}-{restart or 0}-{secrets.token_hex(3)}"


def _nobody_else() -> None:
    """Outside a run directory nothing could tell of a newer incarnation."""
