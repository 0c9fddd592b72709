"""Save checkpoints at intervals and at stops, and record them in the event log."""

import sys
from typing import Any

from hpcrun.checkpoint.interval import SaveInterval
from hpcrun.checkpoint.outcome import SaveOutcome
from hpcrun.checkpoint.sharded.engine import CheckpointEngine
from hpcrun.run.directory import RunDirectory
from hpcrun.run.events import Attempt, note
from hpcrun.run.owner import OwnedByAnotherAttempt
from hpcrun.train.data.batches import Steps
from hpcrun.train.evaluation.early_stopping import EarlyStopping
from hpcrun.train.metrics.log import MetricsLog
from hpcrun.train.step.trainer import AMPTrainer


class Saver:
    """Saves at the configured interval and at stops. After a failed save it reports, and training continues.

    Only one save runs at a time: the next save waits until the previous one is committed, so none is
    skipped. ``saved`` is the newest step known to be committed, ``failed`` the error of the last save or
    None, ``costs`` (seconds that training waited, seconds until the commit) of the last save.
    """

    def __init__(
        self,
        run: RunDirectory,
        attempt: Attempt,
        trainer: AMPTrainer,
        engine: CheckpointEngine,
        *,
        interval: SaveInterval,
        batches: Steps,
        early: EarlyStopping,
        metrics: MetricsLog,
        meta: dict[str, Any],
        saved: int | None,
    ) -> None:
        """``saved``: the restored step, if any. ``batches`` provides the position in the data.

        A checkpoint holds the validation loss of its step, if ``early`` has one, and the
        unlogged part of ``metrics``.
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
        """Return True if it is time to save after ``done`` steps. Call it on every rank after every step."""
        return self._interval.due(done)

    def start(self, done: int) -> None:
        """Save the state after ``done`` steps; the commit happens in the background. Collective.

        Raises:
            OwnedByAnotherAttempt: a newer attempt owns the run now.
        """
        self._wait()
        if done == self.saved:
            return
        at = {"step": done, "samples": self._batches.batching.span(done).start}
        validation = {"validation_loss": self._early.loss} if self._early.seen == done else {}
        stream = self._batches.saved(done)
        extra = at | {
            "early_stopping": self._early.state_dict(),
            "metrics": self._metrics.saved(done),
        }
        self._trainer.start_checkpoint(
            self._engine,
            done,
            extra | ({"stream": stream.shared} if stream.shared else {}),
            self._meta | at | validation,
            {"stream": stream.own} if stream.own else {},
        )

    def poll(self) -> None:
        """Report a save that has finished. Does not wait; does nothing on ranks other than 0."""
        if self._trainer.is_main_process:
            self._record(self._engine.poll())

    def finish(self, done: int) -> None:
        """Save the state after ``done`` steps; wait until it is committed or ``failed`` is set. Collective.

        Raises:
            OwnedByAnotherAttempt: a newer attempt owns the run now.
        """
        self.start(done)
        self._wait()

    def _wait(self) -> None:
        """Wait for the current save, so that all ranks know the same outcome."""
        outcomes = self._engine.wait()
        self._record(outcomes)
        if self._last is not None and self._last.fenced:
            raise OwnedByAnotherAttempt(self._last.error)

    def _record(self, outcomes: list[SaveOutcome]) -> None:
        for outcome in outcomes:
            self._last = outcome
            self.failed = None if outcome.ok else outcome.error or "unknown"
            if outcome.ok:
                self.saved = outcome.step
                self.costs = outcome.stalled, outcome.seconds
            if self._trainer.is_main_process:
                self._report(outcome)

    def _report(self, outcome: SaveOutcome) -> None:
        if not outcome.ok:
            line = f"step {outcome.step} was not saved: {outcome.error}"
            for text in (line, *outcome.notes):
                print(f"hpcrun: {text}", file=sys.stderr, flush=True)
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
            f"training waited {outcome.stalled:.2f} s for it",
            flush=True,
        )
        for line in outcome.notes:
            print(f"hpcrun: {line}", file=sys.stderr, flush=True)
        # `seconds` is the time that training waited; goodput uses it.
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
