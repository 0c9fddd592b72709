"""The training loop. It reads on one screen; everything it calls lives in a file of its own."""

from collections.abc import Callable
from dataclasses import dataclass

from hpcrun.config import Config
from hpcrun.lifecycle.agreement import StopAgreement
from hpcrun.lifecycle.signals import StopReason
from hpcrun.train.data import Steps
from hpcrun.train.metrics import MetricsLog
from hpcrun.train.nonfinite import NonFiniteWatch
from hpcrun.train.position import Position
from hpcrun.train.saver import Saver
from hpcrun.train.task import Task
from hpcrun.train.trainer import AMPTrainer


@dataclass(frozen=True)
class Loop:
    """What the loop works with; put together in job.py."""

    config: Config
    task: Task
    trainer: AMPTrainer
    steps: range
    batches: Steps
    agreement: StopAgreement
    reason_to_stop: Callable[[], StopReason]
    validate: Callable[[], float | None]
    metrics: MetricsLog
    saver: Saver
    nonfinite: NonFiniteWatch
    position: Position

    def run(self) -> StopReason:
        """Train to the last step, or until all ranks agree to stop, and say which (NONE: to the end).

        On return the last step taken is committed, unless ``saver.failed`` says why it is not.
        """
        train = self.config.train
        for step in self.steps:
            stop = self.agreement.exchange(step, self.reason_to_stop())
            if stop:
                self.nonfinite.settle()
                self.saver.finish(step)
                return stop
            self.position.step = step
            # Not before the stop is decided: reading a sample may draw from the generators that are saved.
            micro_batches = next(self.batches)
            result = self.trainer.training_step(micro_batches, self.task.loss)
            done = step + 1
            self.metrics.step(done, result, last=done == train.steps)
            self.nonfinite.look(result)
            if train.validate_every and done % train.validate_every == 0 and done < train.steps:
                with self.metrics.paused():
                    self.saver.validation_loss = self.validate()
                    self.metrics.write(
                        {"step": done, "validation_loss": self.saver.validation_loss}
                    )
            self.saver.look()
            if self.saver.due(done):
                with self.metrics.paused():
                    self.saver.start(done)
        self.nonfinite.settle()
        self.saver.finish(train.steps)
        return StopReason.NONE
