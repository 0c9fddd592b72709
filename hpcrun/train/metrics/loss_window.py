"""The loss of a line of metrics: a mean over all steps since the line before, also over a restart."""

import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from hpcrun.train.data.batching import Batching
from hpcrun.train.step.trainer import StepResult

_NOTHING = [0.0, 0.0, 0.0, 0.0]
"""Losses times samples, and samples: of the steps that were taken, and of those that were skipped."""


class LossWindow:
    """Adds up steps that are in no line yet, each as many times as it has samples over all ranks.

    Those that were skipped are left out, unless all were.
    """

    def __init__(self, batching: Batching) -> None:
        self._batching = batching
        self._results: list[StepResult] = []
        self._before = _NOTHING

    @property
    def results(self) -> Sequence[StepResult]:
        """Of the steps in it that this process has taken."""
        return self._results

    def add(self, result: StepResult) -> None:
        """Take in the next step. Waits for nothing."""
        self._results.append(result)

    def mean(self, done: int) -> float:
        """This rank's mean loss, after ``done`` steps; the next step begins anew. Waits for the device, once.

        The mean over ranks is that over all samples.
        """
        taken, samples, skipped, left_out = self._sums(done)
        self._results, self._before = [], _NOTHING
        return taken / samples if samples else skipped / left_out

    def saved(self, done: int, group: Any) -> list[float]:
        """What a checkpoint after ``done`` steps must hold, alike on all ranks. Collective.

        Args:
            group: a control group of all ranks, or None for a single one.
        """
        if not self._results and self._before is _NOTHING:
            return []
        sums = torch.tensor(self._sums(done), dtype=torch.float64)
        if group is not None:
            dist.all_reduce(sums, group=group)
            sums /= dist.get_world_size(group)
        found: list[float] = sums.tolist()
        return found

    def restore(self, saved: Sequence[float]) -> None:
        """Go on with what :meth:`saved` gave, on any number of ranks."""
        self._before = list(saved) or _NOTHING

    def _sums(self, done: int) -> list[float]:
        sums = [0.0, 0.0, 0.0, 0.0]
        if self._results:
            # To sum up a few numbers is quicker here than there.
            losses: list[float] = torch.stack([result.loss for result in self._results]).tolist()
            first = done - len(losses)
            for step, (loss, result) in enumerate(zip(losses, self._results, strict=True), first):
                samples = self._batching.samples(range(step, step + 1))
                at = 2 if result.verdict.peek() else 0
                sums[at] += loss * samples
                sums[at + 1] += samples
        return list(map(operator.add, sums, self._before))
