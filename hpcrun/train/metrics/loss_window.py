"""Loss of a metrics line: the mean over all steps since the previous line, also across a restart."""

import operator
from collections.abc import Sequence

import torch
import torch.distributed as dist

from hpcrun.ranks.collective import Ranks
from hpcrun.train.data.batching import Batching
from hpcrun.train.step.trainer import StepResult

_NOTHING = [0.0, 0.0, 0.0, 0.0]
"""Sum of losses times samples, and number of samples: of steps that were taken, then of skipped steps."""


class LossWindow:
    """Sums the losses of unlogged steps, weighted by their samples over all ranks.

    Skipped steps are excluded, unless all steps were skipped.
    """

    def __init__(self, batching: Batching) -> None:
        self._batching = batching
        self._results: list[StepResult] = []
        self._before = _NOTHING

    @property
    def results(self) -> Sequence[StepResult]:
        """Results of the unlogged steps of this process."""
        return self._results

    def add(self, result: StepResult) -> None:
        """Add the next step. Does not wait for the device."""
        self._results.append(result)

    def mean(self, done: int) -> float:
        """Return this rank's mean loss after ``done`` steps, and reset. Waits for the device once.

        The mean over ranks is the mean over all samples.
        """
        taken, samples, skipped, skipped_samples = self._sums(done)
        self._results, self._before = [], _NOTHING
        return taken / samples if samples else skipped / skipped_samples

    def saved(self, done: int, ranks: Ranks) -> list[float]:
        """Return what a checkpoint after ``done`` steps needs, identical on all ``ranks``. Collective."""
        if not self._results and self._before is _NOTHING:
            return []
        sums = torch.tensor(self._sums(done), dtype=torch.float64)
        if ranks.world_size > 1:
            dist.all_reduce(sums, group=ranks.group)
            sums /= ranks.world_size
        found: list[float] = sums.tolist()
        return found

    def restore(self, saved: Sequence[float]) -> None:
        """Restore what :meth:`saved` returned, on any number of ranks."""
        self._before = list(saved) or _NOTHING

    def _sums(self, done: int) -> list[float]:
        sums = [0.0, 0.0, 0.0, 0.0]
        if self._results:
            # A few numbers sum faster on the host than on the device.
            losses: list[float] = torch.stack([result.loss for result in self._results]).tolist()
            first = done - len(losses)
            for step, (loss, result) in enumerate(zip(losses, self._results, strict=True), first):
                samples = self._batching.samples(range(step, step + 1))
                at = 2 if result.decision.peek() else 0
                sums[at] += loss * samples
                sums[at + 1] += samples
        return list(map(operator.add, sums, self._before))
