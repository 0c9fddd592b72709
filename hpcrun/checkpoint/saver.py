"""The saver of every loop: interval, start, outcome and restore.

The Task loop, the trainers and :class:`hpcrun.Checkpointer` save through :class:`Saver`; ``hpcrun.resumable``
and Lightning through the ``Checkpointer``. They differ in what a save holds in addition to the state,
in who owns the folder, and in where an outcome is reported.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from hpcrun.checkpoint.interval import EverySteps, SaveInterval
from hpcrun.checkpoint.outcome import Restored, SaveOutcome
from hpcrun.checkpoint.sharded.copies import require_alike
from hpcrun.checkpoint.sharded.engine import CheckpointEngine
from hpcrun.checkpoint.state.training import TrainingState
from hpcrun.checkpoint.state.tree import replicated, split
from hpcrun.run.record import OwnedByAnotherAttempt
from hpcrun.storage.errors import CheckpointError


@dataclass(frozen=True)
class SaveContent:
    """Content of a save in addition to the state.

    Attributes:
        extra: tensors and plain data of all ranks.
        meta: plain JSON data for the manifest.
        own: plain data of this rank.
    """

    extra: dict[str, Any]
    meta: dict[str, Any]
    own: dict[str, Any] = field(default_factory=dict)


class Saver:
    """Saves and restores the state of a training. Every method but :meth:`poll` is collective.

    Only one save runs at a time: the next save waits until the previous one is committed, so none is
    skipped. After a failed save it reports, and the training continues.

    Args:
        engine: writes and reads the checkpoints.
        state: returns the parts of the training, at each save and restore.
        remedy: the call that restores, for a folder with steps that were not restored.
        content: returns what a save after a number of steps holds in addition to the state.
        interval: rule for when a save is due.
        memory: rule for when a snapshot in memory only is due.
        report: called with each outcome, and True if an exception reports it already. On every rank.
        saved: the newest step on disk.
        lenient: a state that cannot be captured fails the save, and not the training.
        compare: the first save refuses ranks with different weights.

    Attributes:
        saved: the newest step that is known to be committed.
        outcome: result of the last save on disk that has ended, as far as this rank knows; None before.
        costs: seconds that training waited for the last committed save, and seconds until its commit; None
            before.
    """

    def __init__(
        self,
        engine: CheckpointEngine,
        state: Callable[[], TrainingState],
        remedy: str,
        *,
        content: Callable[[int], SaveContent] = lambda step: SaveContent({}, {"step": step}),
        interval: SaveInterval | None = None,
        memory: SaveInterval | None = None,
        report: Callable[[SaveOutcome, bool], None] = lambda _, __: None,
        saved: int | None = None,
        lenient: bool = False,
        compare: bool = False,
    ) -> None:
        self._engine, self._state, self._remedy = engine, state, remedy
        self._content, self._report, self._lenient = content, report, lenient
        self._interval = interval or EverySteps(0)
        self._memory = memory or EverySteps(0)
        self._compared = not compare
        self._asked = saved
        self._last: SaveOutcome | None = None
        self._begun = False
        self.saved = saved
        self.outcome: SaveOutcome | None = None
        self.costs: tuple[float, float] | None = None

    @property
    def failed(self) -> str | None:
        """The error of the last save on disk; None if it succeeded."""
        if self.outcome is None or self.outcome.ok:
            return None
        return self.outcome.error or "unknown"

    def restore(
        self, extra: dict[str, Any] | None = None, skip: Collection[int] = ()
    ) -> Restored | None:
        """Load the newest valid checkpoint, and begin the interval; return None without a checkpoint.

        Args:
            extra: live data of the user, filled in place; None: only returned.
            skip: steps to ignore.

        Raises:
            CheckpointError: checkpoints exist but none is valid, or the newest does not fit.
        """
        state = self._state()
        restored = self._engine.restore(state.template(extra), skip)
        self._interval.due(0 if restored is None else restored.step)
        if restored is None:
            return None
        self._asked = self.saved = restored.step
        return state.restore(restored, extra)

    # Only values that are equal on all ranks may decide about a save; what `poll` learns differs.

    def due(self, done: int) -> bool:
        """Return True if it is time to save after ``done`` steps. Call it on every rank after every step."""
        return self._interval.due(done) and done != self._asked

    def due_in_memory(self, done: int) -> bool:
        """Return True if it is time for a snapshot in memory. Call it on every rank after every step."""
        return self._memory.due(done)

    def start(
        self, done: int, content: Callable[[int], SaveContent] | None = None, *, memory: bool = True
    ) -> None:
        """Save the state after ``done`` steps, unless it is saved; the commit happens in the background.

        Args:
            content: in place of that of the constructor.
            memory: keep a copy in the memory of the nodes too, if there is such memory.

        Raises:
            OwnedByAnotherAttempt: a newer attempt owns the run now.
            CheckpointError: as for :meth:`begin`.
        """
        self.wait()
        if done != self.saved:
            self.begin(done, content, memory=memory)

    def start_in_memory(self, done: int) -> None:
        """Keep the state after ``done`` steps in the memory of the nodes, in the background.

        Nothing happens while a save is pending, which keeps its own copy in memory.

        Raises:
            OwnedByAnotherAttempt: a newer attempt owns the run now.
        """
        if self._engine.ready_for_memory():
            self.wait()
            self.begin(done, disk=False)

    def begin(
        self,
        step: int,
        content: Callable[[int], SaveContent] | None = None,
        *,
        disk: bool = True,
        memory: bool = True,
    ) -> None:
        """Start a save in any case.

        Args:
            step: number of finished steps.
            content: in place of that of the constructor.
            disk: as for :meth:`CheckpointEngine.start`.
            memory: as for :meth:`CheckpointEngine.start`.

        Raises:
            CheckpointError: checkpoints existed before and were not restored, no save can write this state,
                or (first save) the ranks hold different weights. On all ranks.
        """
        self._engine.require_restored(self._remedy)
        state: TrainingState | None = None
        shared: dict[str, Any] = {}
        kept, own, trouble = SaveContent({}, {}), dict[str, Any](), None
        try:
            kept = (content or self._content)(step)
            state = self._state()
            shared, own = state.capture(kept.extra)
        except Exception as error:  # other ranks may have no error, and would wait for this rank
            if not self._lenient:
                raise
            trouble = error
        if state is None:
            state = self._state()
        if not self._compared:
            self._compared = self._compare(state, None if trouble else shared)
        self._engine.start(
            *(step, shared, {**kept.own, **own}, kept.meta, state.alike(), trouble),
            disk=disk,
            memory=memory,
        )
        self._begun = True
        if disk:
            self._asked = step

    def poll(self) -> None:
        """Report a save that has finished. Does not wait; other ranks may learn of it later."""
        if self._begun:
            self._record(self._engine.poll())

    def wait(self, patience: float | None = None, *, must: bool = False) -> None:
        """Wait for the pending save, so that all ranks know the same outcome.

        Args:
            patience: seconds to wait if another rank may never take part in the save; None: no limit.
            must: raise an exception if the last save failed.

        Raises:
            OwnedByAnotherAttempt: a newer attempt owns the run now.
            CheckpointError: ``must``, and the last save failed.
        """
        self._record(self._engine.wait(patience), raised=must)
        if self._last is not None and self._last.fenced:
            raise OwnedByAnotherAttempt(self._last.error)
        if must and self.failed is not None and self.outcome is not None:
            raise CheckpointError(f"step {self.outcome.step} was not saved: {self.outcome.error}")

    def finish(self, done: int) -> None:
        """Save the state after ``done`` steps; wait until it is committed or :attr:`failed` is set.

        This save keeps no copy in memory, for which the ranks would have to wait.

        Raises:
            OwnedByAnotherAttempt: a newer attempt owns the run now.
        """
        self.start(done, memory=False)
        self.wait()

    def _record(self, outcomes: list[SaveOutcome], *, raised: bool = False) -> None:
        for outcome in outcomes:
            self._last, self._begun = outcome, False
            if not outcome.in_memory:
                self.outcome = outcome
                if outcome.ok:
                    self.saved = outcome.step
                    self.costs = outcome.stalled, outcome.seconds
            self._report(outcome, raised and outcome is outcomes[-1])

    def _compare(self, state: TrainingState, shared: dict[str, Any] | None) -> bool:
        ranks = self._engine.ranks
        if ranks.world_size == 1 or replicated(state.model):
            return True
        tensors = None if shared is None else split(shared)[1]
        return require_alike(tensors, state.alike(), ranks)
