"""When a run saves, and what the event log says of it."""

import sys
from typing import Any

from hpcrun.checkpoint.interval import Interval
from hpcrun.checkpoint.outcome import SaveOutcome
from hpcrun.checkpoint.sharded.engine import CheckpointEngine
from hpcrun.run.directory import RunDirectory
from hpcrun.run.events import Attempt, note
from hpcrun.run.owner import Superseded
from hpcrun.train.data.batches import Steps
from hpcrun.train.evaluation.early_stopping import EarlyStopping
from hpcrun.train.metrics.log import MetricsLog
from hpcrun.train.step.trainer import AMPTrainer


class Saver:
    """Saves at its interval and at stops, once a step. A failed save is reported, and training goes on.

    One save is under way at a time: one that comes due before the last is committed waits for it, so
    that none is left out. ``saved`` is the newest step known to be committed, ``failed`` why the last
    is not, ``costs`` the seconds that it took from training and to its commit.
    """

    def __init__(
        self,
        run: RunDirectory,
        attempt: Attempt,
        trainer: AMPTrainer,
        engine: CheckpointEngine,
        *,
        interval: Interval,
        batches: Steps,
        early: EarlyStopping,
        metrics: MetricsLog,
        meta: dict[str, Any],
        saved: int | None,
    ) -> None:
        """``saved``: the step restored from, if any. ``batches`` tells where the data stands.

        A checkpoint keeps the validation loss of its own step, if ``early`` has seen one there, and what
        ``metrics`` has not logged yet.
        """
        self._run, self._attempt = run, attempt
        self._trainer, self._engine = trainer, engine
        self._interval, self._meta = interval, meta
        self._batches, self._early, self._metrics = batches, early, metrics
        self.saved = saved
        self.costs: tuple[float, float] | None = None
        self.failed: str | None = None
        self._last: SaveOutcome | None = None

    def due(self, done: int) -> bool:
        """Whether the interval asks for a save after ``done`` steps. Every rank asks after every step."""
        return self._interval.due(done)

    def start(self, done: int) -> None:
        """Take a snapshot of the state after ``done`` steps; it is committed beside the training. Collective.

        Raises:
            Superseded: another incarnation owns the run now.
        """
        self._settle()
        if done == self.saved:
            return
        at = {"step": done, "samples": self._batches.batching.span(done).start}
        told = {"validation_loss": self._early.loss} if self._early.seen == done else {}
        stream = self._batches.saved(done)
        extra = at | {
            "early_stopping": self._early.state_dict(),
            "metrics": self._metrics.saved(done),
        }
        self._trainer.start_checkpoint(
            self._engine,
            done,
            extra | ({"stream": stream.shared} if stream.shared else {}),
            self._meta | at | told,
            {"stream": stream.own} if stream.own else {},
        )

    def look(self) -> None:
        """Report a save that has ended meanwhile. Waits for nothing; only rank 0 does anything."""
        if self._trainer.is_main_process:
            self._record(self._engine.poll())

    def finish(self, done: int) -> None:
        """Return when the state after ``done`` steps is committed, or ``failed`` says why not. Collective.

        Raises:
            Superseded: another incarnation owns the run now.
        """
        self.start(done)
        self._settle()

    def _settle(self) -> None:
        """Wait for the save under way, so that all ranks know the same of it."""
        outcomes = self._engine.wait()
        self._record(outcomes)
        if self._last is not None and self._last.fenced:
            raise Superseded(self._last.error)

    def _record(self, outcomes: list[SaveOutcome]) -> None:
        for outcome in outcomes:
            self._last = outcome
            self.failed = None if outcome.ok else outcome.error or "unknown"
            if outcome.ok:
                self.saved = outcome.step
                self.costs = outcome.stalled, outcome.seconds
            if self._trainer.is_main_process:
                self._tell(outcome)

    def _tell(self, outcome: SaveOutcome) -> None:
        if not outcome.ok:
            line = f"step {outcome.step} was not saved: {outcome.error}"
            for told in (line, *outcome.notes):
                print(f"hpcrun: {told}", file=sys.stderr, flush=True)
            if not outcome.fenced:
                note(
                    self._run,
                    "save-failed",
                    self._attempt,
                    step=outcome.step,
                    reason=outcome.error,
                )
            return
        print(
            f"hpcrun: saved step {outcome.step} in {outcome.seconds:.2f} s, "
            f"{outcome.stalled:.2f} s of it training waited",
            flush=True,
        )
        for line in outcome.notes:
            print(f"hpcrun: {line}", file=sys.stderr, flush=True)
        # `seconds` is what the save took from training: goodput is counted with it.
        note(
            self._run,
            "saved",
            self._attempt,
            step=outcome.step,
            seconds=round(outcome.stalled, 3),
            written_seconds=round(outcome.seconds, 3),
            bytes=outcome.bytes,
            host_memory=outcome.staged,
        )
