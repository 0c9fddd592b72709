"""The training loop, on one screen; other files define the functions that it calls."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from hpcrun.config import Config
from hpcrun.ranks.agreement import StopAgreement
from hpcrun.ranks.signals import StopReason
from hpcrun.train.evaluation.early_stopping import EarlyStopping
from hpcrun.train.health.nonfinite import NonFiniteWatch
from hpcrun.train.metrics.log import MetricsLog
from hpcrun.train.metrics.profiling import Profile
from hpcrun.train.metrics.timing import TimedSteps
from hpcrun.train.model.compile_cache import CompileCache
from hpcrun.train.phase import VALIDATING, Position
from hpcrun.train.saving import Saver
from hpcrun.train.step.trainer import StepResult


@dataclass(frozen=True)
class Loop:
    """Parts of the loop; session.py makes them."""

    config: Config
    steps: range
    batches: TimedSteps
    take: Callable[[int, list[Any]], StepResult]
    agreement: StopAgreement
    reason_to_stop: Callable[[], StopReason]
    validate: Callable[[], float | None]
    early: EarlyStopping
    metrics: MetricsLog
    saver: Saver
    nonfinite: NonFiniteWatch
    profile: Profile
    position: Position
    compiled: CompileCache

    def run(self) -> StopReason:
        """Train to the end, or until all ranks agree to stop; return the reason (NONE: the end).

        On return the last step is committed, unless ``saver.failed`` says why not.
        """
        train = self.config.train
        for step in self.steps:
            stop = self.agreement.exchange(step, self.reason_to_stop())
            if stop:
                self.nonfinite.finish()
                with self._saving():
                    self.saver.finish(step)
                return stop
            self.position.step = step
            self.profile.before(step)
            # Only after the stop decision: reading a sample may draw from the generators that are saved.
            micro_batches = next(self.batches)
            result = self.take(step, micro_batches)
            done = step + 1
            self.compiled.after_step()
            self.metrics.step(done, result)
            self.nonfinite.check(result)
            best = self._validate(done)
            if self.early.due:
                self.metrics.log_pending(done)
            self.saver.poll()
            if self.saver.due(done) or (best and self.config.checkpoint.keep_best):
                with self._saving():
                    self.saver.start(done)
            if self.early.due:
                break
        self.profile.close(self.early.end(train.steps))
        self.nonfinite.finish()
        with self._saving():
            self.saver.finish(self.early.end(train.steps))
        return StopReason.NONE

    @contextlib.contextmanager
    def _saving(self) -> Iterator[None]:
        """Flush the metrics before a save, so that all lines up to its step are written."""
        with self.position.at("saving"), self.metrics.paused():
            self.metrics.flush()
            self.compiled.save()
            yield

    def _validate(self, done: int) -> bool:
        """Validate if it is time; return True if the loss is the lowest so far."""
        train = self.config.train
        every = train.validate_every
        if done != train.steps and not (every and done % every == 0):
            return False
        with self.position.at(VALIDATING), self.metrics.paused():
            loss = self.validate()
            if loss is not None:
                self.metrics.write({"step": done, "validation_loss": loss})
        return self.early.record(done, loss)
