"""Handle non-finite gradients: report them, trace them to samples, and stop if necessary.

step/gate.py skips such a step on all ranks, because all ranks check the same reduced gradients. Every rank
therefore calls this code at the same step, without further communication.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.utils.data import Dataset, IterableDataset

from hpcrun.config import Config
from hpcrun.errors import PeerFailed, PlannedStop
from hpcrun.printing import say_aside
from hpcrun.ranks.collective import Ranks
from hpcrun.run.attempt import Attempt
from hpcrun.run.directory import RunDirectory
from hpcrun.run.endings import node_name
from hpcrun.run.journal.events import Nonfinite
from hpcrun.run.journal.journal import Journal
from hpcrun.train.data.batches import length
from hpcrun.train.data.batching import Batching, samples
from hpcrun.train.step.trainer import AMPTrainer, StepResult
from hpcrun.train.step.weighting import impossible

Samples = Callable[[int, int], list[list[int]]]
"""Return the dataset indices of a rank at a step, a list per micro-batch."""

REPORTS = 20
"""Maximum number of reported steps per attempt, in addition to the step of the stop."""


class NotFinite(PlannedStop):
    """Error that stops the training; the text names the step and the rank.

    The restart policy treats it as any failure: another start may help against a faulty chip; otherwise the
    second stop at the same step ends the run (``restarts.same_step``).
    """


@dataclass(frozen=True)
class _Found:
    """Report of one rank about a step."""

    host: str
    loss: float
    weights: list[tuple[int, float]]
    """Invalid weights by micro-batch; a single invalid weight makes the sum of all ranks invalid."""

    @property
    def lost(self) -> bool:
        """True if the loss itself is not finite, so the loss scale is not the cause."""
        return not math.isfinite(self.loss)


class NonFiniteWatch:
    """Watches the gate's decision about every step, as soon as it is known."""

    def __init__(
        self,
        run: RunDirectory,
        attempt: Attempt,
        config: Config,
        trainer: AMPTrainer,
        *,
        start: int,
        ranks: Ranks,
        samples: Samples | None,
    ) -> None:
        """``start``: steps done before; ``ranks``: all ranks, with a control group.

        ``samples``: None for a stream, which has no sample indices.
        """
        self._run, self._attempt, self._trainer = run, attempt, trainer
        self._ranks, self._samples = ranks, samples
        # A dynamic loss scale causes single overflows in normal operation; only many consecutive ones are a
        # problem. Losses are checked before scaling.
        self._scaled = trainer.scaler.is_enabled() and config.amp.dynamic
        self._limit = config.train.nonfinite_limit
        self._first = start - trainer.gate.steps
        self._seen = trainer.gate.skipped
        self._results: deque[StepResult] = deque(maxlen=2)
        self._reports, self._reported = 0, False

    def check(self, result: StepResult) -> None:
        """Record the result of a step; call it after every step, on every rank.

        Raises:
            NotFinite: training must stop, and this rank is a cause.
            PeerFailed: training must stop, and another rank raises the cause.
        """
        self._results.append(result)
        if self._trainer.gate.skipped != self._seen:
            self._act()

    def finish(self) -> None:
        """Check the last step, which may still be undecided; raises as :meth:`check` does."""
        self._trainer.gate.resolve_pending()
        if self._trainer.gate.skipped != self._seen:
            self._act()

    def _act(self) -> None:
        gate = self._trainer.gate
        new, self._seen = gate.skipped - self._seen, gate.skipped
        in_a_row = gate.skipped_in_row
        self._reported = self._reported and in_a_row > new
        fresh = not self._reported and self._reports < REPORTS
        many = in_a_row >= self._limit
        if not (fresh or many):
            return
        ranks = self._gather(self._results[-2 if gate.pending else -1])
        overflow = self._scaled and not any(rank.lost for rank in ranks)
        if overflow and not many:
            return
        self._reports, self._reported = self._reports + 1, True
        step = self._first + gate.steps - 1
        if self._ranks.rank == 0:
            self._report(step, in_a_row, ranks)
        if many:
            self._stop(step, in_a_row, ranks)

    def _gather(self, result: StepResult) -> list[_Found]:
        """Gather every rank's report about the step with this ``result``. Collective."""
        weights = [(n, float(one)) for n, one in enumerate(result.weights) if impossible(one)]
        return self._ranks.gather(_Found(node_name(), result.loss.item(), weights))

    def _report(self, step: int, in_a_row: int, ranks: list[_Found]) -> None:
        """Print the step, and write it to the event log with the samples of the first rank that causes it."""
        bad = _guilty(ranks)
        say_aside(f"hpcrun: skipped step {step}: gradients are not finite; {_whose(ranks)}")
        samples = self._samples(step, bad[0]) if bad and self._samples else None
        event = Nonfinite(
            attempt=self._attempt, step=step, in_a_row=in_a_row, ranks=bad, samples=samples
        )
        Journal(self._run).note(event)

    def _stop(self, step: int, in_a_row: int, ranks: list[_Found]) -> None:
        bad = _guilty(ranks) or [0]
        if self._ranks.rank not in bad:
            raise PeerFailed(f"gradients are not finite at step {step}; see rank {bad[0]}")
        row = f", {in_a_row} consecutive steps" if in_a_row > 1 else ""
        known = any(found.weights for found in ranks)
        more = "" if known else ", at train.lr, or use a higher precision (amp.dtype)"
        raise NotFinite(
            f"gradients are not finite at step {step}{row} (train.nonfinite_limit); {_whose(ranks)}; "
            f"check its samples, in {self._run.events.name}{more}"
        )


def _guilty(ranks: list[_Found]) -> list[int]:
    """Return the ranks that cause it: those with invalid weights, or else with non-finite losses."""
    invalid = [rank for rank, found in enumerate(ranks) if found.weights]
    return invalid or [rank for rank, found in enumerate(ranks) if found.lost]


def _whose(ranks: list[_Found]) -> str:
    """Describe the loss or weight that causes it, if there is one."""
    bad = _guilty(ranks)
    if not bad:
        return "every rank's loss is finite"
    rank, found = bad[0], ranks[bad[0]]
    more = f", and of {len(bad) - 1} more" if len(bad) > 1 else ""
    if found.weights:
        number, weight = found.weights[0]
        where = f"micro-batch {number} of rank {rank} on {found.host}"
        return f"the task's weight of {where} is {weight:g}{more}"
    return f"the loss of rank {rank} on {found.host} is {found.loss}{more}"


def samples_of(dataset: Dataset[Any], batching: Batching, seed: int) -> Samples | None:
    """Return a function that recomputes the samples of a rank at a step; None for a stream."""
    if isinstance(dataset, IterableDataset):
        return None
    size = length(dataset)

    def at(step: int, rank: int) -> list[list[int]]:
        taken = zip(batching.positions(step, rank), batching.counts(rank), strict=True)
        return [samples(part, size, seed).tolist() for part, count in taken if count]

    return at
