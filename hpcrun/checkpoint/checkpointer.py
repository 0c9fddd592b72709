"""A checkpointer for any training loop: it takes a folder, a model and an optimizer."""

import math
import sys
import warnings
import weakref
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from hpcrun.checkpoint.folder import (
    folder_engine,
    folder_store,
    require_arguments,
    require_step,
)
from hpcrun.checkpoint.interval import EverySeconds, EverySteps, SaveInterval
from hpcrun.checkpoint.outcome import SaveOutcome
from hpcrun.checkpoint.saver import SaveContent, Saver
from hpcrun.checkpoint.sharded.engine import CheckpointEngine
from hpcrun.checkpoint.sharded.idle_threads import GLOO_WORKERS, wait_until_idle
from hpcrun.checkpoint.sharded.plan import require_dense
from hpcrun.checkpoint.state.bucket_order import BucketOrder
from hpcrun.checkpoint.state.capture import plain
from hpcrun.checkpoint.state.compatibility import broadcast
from hpcrun.checkpoint.state.hook_state import HookStates
from hpcrun.checkpoint.state.training import RankPart, TrainingState
from hpcrun.checkpoint.state.tree import fill, split, taken
from hpcrun.devices.accelerator import is_accelerator
from hpcrun.ranks.collective import Ranks
from hpcrun.ranks.tree_group import new_control_group
from hpcrun.run.lock_file import LockFile
from hpcrun.storage.errors import CheckpointError, CheckpointWarning
from hpcrun.storage.retention import Retention

_CODE = str(Path(__file__).parents[1])


class Checkpointer:
    """Saves and restores the state of any training loop, on one process or all ranks of torch.distributed.

    Call :meth:`close` at the end of training, or use the object as a context manager: both wait for the
    pending save. Every method is collective: all ranks call it, with the same step. With a save interval,
    the constructor creates the folder and takes its lock. In a job of hpcrun each commit is reported, as
    ``hpcrun.report(step, saved=True)`` does.

    Args:
        folder: the folder of the checkpoints; created if missing, with its parents.
        model: a plain module, in DDP, compiled, or sharded by ``fully_shard``.
        optimizer: created after the model was sharded.
        scaler: a ``GradScaler``, or None.
        scheduler: a learning-rate scheduler, or None.
        extra: plain data, tensors and objects with ``state_dict()`` and ``load_state_dict()``, read at
            each save. :meth:`restore` updates objects and tensors in place, and replaces plain data.
        own: as ``extra``, but each rank saves and restores its own values; keep tensors small. A restore on
            another number of ranks is refused.
        same_weights: False if the ranks' weights differ on purpose, as with local SGD. Otherwise the first
            save refuses this. ``own`` then needs the model and the optimizer.
        every: steps between saves. :meth:`maybe_save` saves at each multiple, or at the first call after
            a multiple; 0: only :meth:`save` saves.
        minutes: minutes between saves; replaces ``every``.
        retention: rule for the checkpoints to keep.
        host_memory: gigabytes (10^9 bytes) of host memory per rank for a snapshot; None: half of the free
            memory.

    Attributes:
        extra: the argument; add, replace and read values at any time.
        notes: remarks of the last restore: skipped damage, a changed number of ranks, a new scheduler.
        patience: seconds that a rank which fails, or ends without :meth:`close`, waits for its save: another
            rank may never take part. Set it at any time; the default is 60.

    Raises:
        CheckpointError: an argument is invalid, the state cannot be saved, another training run saves to
            the folder, or the folder is writable by everybody. Raised on all ranks.
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
        own: dict[str, Any] | None = None,
        same_weights: bool = True,
        every: int = 100,
        minutes: float | None = None,
        retention: Retention | None = None,
        host_memory: float | None = None,
    ) -> None:
        ready = dist.is_available() and dist.is_initialized()
        rank = dist.get_rank() if ready else 0
        world_size = dist.get_world_size() if ready else 1
        group = new_control_group() if world_size > 1 else None
        self._ranks = Ranks(rank, world_size, group, CheckpointError)
        hooks = HookStates([model], buckets=BucketOrder(model, for_hooks=True))
        state = self._state = TrainingState(
            model,
            optimizer,
            scaler=scaler,
            scheduler=scheduler,
            buffers_differ=world_size > 1 and not broadcast(model),
            rank_parts={"hooks": hooks.part} | ({} if own is None else {"extra": _part_of(own)}),
        )
        self.extra: dict[str, Any] = {} if extra is None else extra
        self._retention = Retention() if retention is None else retention
        store = self._store = folder_store(folder)
        lock = self._lock = _lock_of(store.root)

        def still_mine() -> None:
            store.make_root()
            lock.hold()

        with self._ranks.agreed():
            every = require_arguments(model, every, minutes, host_memory)
        self.require_savable()
        self._ranks.from_rank_0(store.require_private)
        self._claimed = bool(every) or minutes is not None
        if self._claimed:
            self._ranks.from_rank_0(self._claim)
        self._engine = folder_engine(
            store,
            self._ranks,
            pinned=any(is_accelerator(parameter.device) for parameter in model.parameters()),
            still_mine=still_mine,
            retention=self._retention,
            host_memory=host_memory,
        )
        interval: SaveInterval = EverySteps(every)
        if minutes is not None:
            interval = EverySeconds(lambda: 60.0 * minutes, self._ranks)
        self._saver = Saver(
            self._engine,
            lambda: state,
            "restore()",
            interval=interval,
            # No reference to this object: it closes the folder as soon as the program drops it.
            report=partial(_report, self._ranks),
            lenient=True,
            compare=same_weights,
        )
        self._asked: int | None = None
        self.notes: tuple[str, ...] = ()
        # For a program that ends without `close`: the interpreter must not exit while a thread saves.
        weakref.finalize(self, _leave, self._engine, self._lock, self._ranks)

    @property
    def patience(self) -> float:
        """Seconds that a rank which fails, or ends without :meth:`close`, waits for its save."""
        return self._engine.patience

    @patience.setter
    def patience(self, seconds: float) -> None:
        self._engine.patience = seconds

    @property
    def outcome(self) -> SaveOutcome | None:
        """Result of the last save that has ended, as far as this rank knows; None before."""
        return self._saver.outcome

    @property
    def saving(self) -> bool:
        """True while a save is pending on this rank; other ranks may have another answer."""
        return self._engine.under_way

    def restore(self) -> int:
        """Load the newest valid checkpoint.

        Restores model, optimizer, scaler, scheduler and ``extra``, and on the same number of ranks also
        the random generators. Create data loaders before this call: they draw random numbers.

        Returns:
            The number of finished steps; 0 without a checkpoint.

        Raises:
            CheckpointError: checkpoints exist but none is valid, or the newest does not fit the model.
            ReadFailure: a node failed to read the newest checkpoint (a subclass of CheckpointError).
        """
        self._saver.wait()
        restored = self._saver.restore(self.extra)
        if restored is None:
            return 0
        self.notes = restored.notes
        return restored.step

    def maybe_save(self, step: int, *, metric: float | Tensor | None = None) -> bool:
        """Start an asynchronous save after ``step`` steps if the interval has passed.

        A failed save appears in ``outcome`` and as a warning; the next interval saves again.

        Args:
            step: number of finished steps.
            metric: see :meth:`save`.

        Returns:
            True if a save was started.

        Raises:
            TypeError: ``step`` is not an integer.
            CheckpointError: as for :meth:`save`, or ``step`` is negative.
        """
        step = require_step(step)
        self._saver.poll()
        if not self._saver.due(step):
            return False
        self.save(step, metric=metric)
        return True

    def save(self, step: int, *, metric: float | Tensor | None = None) -> None:
        """Save the state after ``step`` steps asynchronously, unless this step is already saved.

        Args:
            step: number of finished steps.
            metric: value for ``Retention(best=…)``, a number or a tensor of one element. Lower is better;
                higher is better if the metric's name begins with ``-``. The value of rank 0 is used.

        Raises:
            TypeError: ``step`` is not an integer.
            CheckpointError: ``step`` is negative, checkpoints existed before and :meth:`restore` was not
                called, another training run saves to the folder, or (first save) the ranks hold different
                weights. Raised on all ranks.
        """
        step = require_step(step)
        if not self._claimed:
            self._ranks.from_rank_0(self._claim)
            self._claimed = True
        self._asked = step
        self._saver.start(step, lambda _: SaveContent(taken(self.extra), self._meta(step, metric)))

    def wait(self) -> SaveOutcome | None:
        """Wait for the pending save, and return the result of the last save.

        Raises:
            CheckpointError: the save failed. Raised on all ranks.
        """
        self._saver.wait(must=True)
        return self.outcome

    def close(self) -> None:
        """Wait for the pending save, and release the folder; a later save takes the folder again.

        Call it before ``torch.distributed.destroy_process_group()``, which would end a pending save.

        Raises:
            CheckpointError: the last save failed. Raised on all ranks.
        """
        self.__exit__(None, None, None)

    def __enter__(self) -> "Checkpointer":
        if self._claimed:
            self._ranks.from_rank_0(self._lock.hold)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        ended = isinstance(error, SystemExit)
        patience = self.patience
        try:
            if error is None or (isinstance(error, SystemExit) and not error.code):
                self.wait()  # an exit code of 0 must mean that the save succeeded
            else:
                single = self._ranks.world_size == 1
                self._saver.wait(None if single or ended else patience)
                if self.saving:
                    text = f"step {self._asked} was not saved within {patience:g} s"
                    patience = 0.0  # the wait above used the time
                    warnings.warn(text, CheckpointWarning, stacklevel=2)
        finally:
            self._claimed = False
            _leave(self._engine, self._lock, self._ranks, patience)

    def require_savable(self) -> None:
        """Do what a save does with the state before its copy. Collective.

        Raises:
            CheckpointError: the state cannot be saved; the text says what and where. Raised on all ranks.
        """
        with self._ranks.agreed():
            try:
                shared, own = self._state.capture(taken(self.extra))
                plain(own)
            except RecursionError as error:
                raise CheckpointError("extra: nested too deeply, or contains itself") from error
            require_dense(split(shared)[1])

    def _meta(self, step: int, metric: float | Tensor | None) -> dict[str, Any]:
        if metric is None:
            if self._retention.best:
                _warn(
                    self._ranks,
                    "Retention(best=…) needs save(step, metric=…), but no metric was passed",
                )
            return {"step": step}
        value = float(metric)
        score = {self._retention.metric.removeprefix("-"): value} if math.isfinite(value) else {}
        return {"step": step, **score}

    def _claim(self) -> None:
        self._store.make_root()
        # A previous attempt may be ending; a lock of a dead host is taken over after three minutes.
        self._lock.take(here=3.0, elsewhere=200.0, waiting=self._wait_for)

    def _wait_for(self, holder: str) -> None:
        _warn(
            self._ranks, f"{self._store.root}: waiting up to 200 s for {holder}, which saves there"
        )


def _report(ranks: Ranks, outcome: SaveOutcome, raised: bool) -> None:
    for note in outcome.notes:
        _warn(ranks, f"step {outcome.step}: {note}")
    if not outcome.ok and not raised:
        _warn(ranks, f"step {outcome.step} was not saved: {outcome.error}")


def _warn(ranks: Ranks, text: str) -> None:
    if ranks.rank == 0:
        warnings.warn(text, CheckpointWarning, stacklevel=_depth_of_user())


def _depth_of_user() -> int:
    """Return the number of calls between the warning and the code of the user."""
    depth, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_CODE):
        depth, frame = depth + 1, frame.f_back
    return depth


def _part_of(own: dict[str, Any]) -> RankPart:
    """Return the part of the checkpoint with the values of each rank."""

    def restore(saved: Any) -> None:
        if saved is None:
            raise CheckpointError(
                "the checkpoint has no values of this rank; start as many ranks as have saved it"
            )
        fill(own, saved, [], "own")

    return RankPart(lambda: taken(own, "own"), restore)


def _lock_of(folder: Path) -> LockFile:
    """Return the lock of a folder without a run directory: only one training run may save there.

    Two training runs would delete each other's temporary folders. A run directory has its owner record.
    """
    path = folder / ".lock"
    busy = (
        f"{folder}: another Checkpointer saves there ({{holder}}); use another folder, leave its block, "
        f"end its training run, or pass every=0 to read only; if it has ended, remove {path}"
    )
    return LockFile(path, busy, error=CheckpointError)


def _leave(
    engine: CheckpointEngine, lock: LockFile, ranks: Ranks, patience: float | None = None
) -> None:
    """Wait for the pending save, and close the lock: no work may be left when the interpreter exits."""
    several = engine.patience if patience is None else patience
    engine.wait(None if ranks.world_size == 1 else several)
    if ranks.world_size > 1:
        wait_until_idle(GLOO_WORKERS, patience=2.0)
    if not engine.under_way:
        lock.release()
