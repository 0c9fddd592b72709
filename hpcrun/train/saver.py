"""When a run saves, and what the event log says of it."""

import sys
from typing import Any

from hpcrun.checkpoint.writer import SaveOutcome, Writer
from hpcrun.run.directory import RunDirectory
from hpcrun.run.events import Attempt, note
from hpcrun.run.owner import Superseded
from hpcrun.train.trainer import AMPTrainer


class Saver:
    """Saves at its interval and at stops, once a step. A failed save is reported, and training goes on."""

    def __init__(
        self,
        run: RunDirectory,
        attempt: Attempt,
        trainer: AMPTrainer,
        writer: Writer,
        *,
        every: int,
        batch_size: int,
        meta: dict[str, Any],
        saved: int | None,
    ) -> None:
        """``every``: steps between saves, 0 for stops only; ``saved``: the step restored from, if any."""
        self._run, self._attempt = run, attempt
        self._trainer, self._writer = trainer, writer
        self._every, self._batch_size, self._meta = every, batch_size, meta
        self.saved = saved
        self.failed: str | None = None

    def due(self, done: int) -> bool:
        """Whether the interval asks for a save after ``done`` steps."""
        return bool(self._every) and done % self._every == 0

    def save(self, done: int) -> None:
        """Commit the state after ``done`` steps, unless it is committed already. Collective.

        Raises:
            Superseded: another incarnation owns the run now.
        """
        if done == self.saved:
            return
        extra = {"step": done, "samples": done * self._batch_size}
        outcome = self._trainer.save_checkpoint(self._writer, done, extra, self._meta | extra)
        self.failed = None if outcome.ok else outcome.error or "unknown"
        if outcome.ok:
            self.saved = done
        if self._trainer.is_main_process:
            self._tell(done, outcome)
        if outcome.fenced:
            raise Superseded(outcome.error)

    def _tell(self, done: int, outcome: SaveOutcome) -> None:
        if outcome.ok:
            print(f"hpcrun: saved step {done} in {outcome.seconds:.2f} s", flush=True)
            for line in outcome.notes:
                print(f"hpcrun: {line}", file=sys.stderr, flush=True)
            note(
                self._run,
                "saved",
                self._attempt,
                step=done,
                seconds=round(outcome.seconds, 3),
                bytes=outcome.bytes,
            )
            return
        print(f"hpcrun: step {done} was not saved: {outcome.error}", file=sys.stderr, flush=True)
        if not outcome.fenced:
            note(self._run, "save-failed", self._attempt, step=done, reason=outcome.error)
