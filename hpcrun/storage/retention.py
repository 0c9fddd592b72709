"""Retention: keep the newest checkpoints, every n-th, and the best."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hpcrun.storage.errors import CheckpointError
from hpcrun.storage.store import CheckpointStore


@dataclass(frozen=True)
class Retention:
    """Rule for the checkpoints to keep: the newest, multiples of a step count, and the best by a metric.

    Attributes:
        keep: number of newest checkpoints, at least 1.
        every: keep each multiple of this number of steps; 0: none.
        best: number of best checkpoints to keep.
        metric: key in ``meta`` of the manifests. Lower is better; with a leading ``-`` (``-accuracy``)
            higher is better.

    Raises:
        CheckpointError: a value is not a whole number, or ``keep`` is below 1.
    """

    keep: int = 3
    every: int = 0
    best: int = 0
    metric: str = "validation_loss"

    def __post_init__(self) -> None:
        for name in ("keep", "every", "best"):
            value = getattr(self, name)
            if type(value) is not int or value < 0:
                raise CheckpointError(f"{name}={value!r}: not a number of checkpoints or steps")
        if self.keep < 1:
            raise CheckpointError(f"keep={self.keep}: at least one checkpoint must be kept")

    def protected(self, metas: Mapping[int, Mapping[str, Any]]) -> set[int]:
        """Return the steps to keep regardless of their age.

        Args:
            metas: for each valid checkpoint its step, and the ``meta`` of its manifest with the metric.
        """
        stay = {step for step in metas if self.every and step % self.every == 0}
        name, sign = self.metric.removeprefix("-"), -1.0 if self.metric.startswith("-") else 1.0
        scores = []
        for step, meta in metas.items():
            value = meta.get(name)
            if isinstance(value, int | float) and math.isfinite(value):
                # Of equal scores, prefer the later step, which was trained longer.
                scores.append((sign * value, -step))
        return stay | {-step for _, step in sorted(scores)[: self.best]}


def pruning(store: CheckpointStore, retention: Retention) -> Callable[[int], None]:
    """Return the function that rank 0 calls after each commit to prune; it raises CheckpointError."""

    def after_commit(step: int) -> None:
        metas: dict[int, Mapping[str, Any]] = {}
        if retention.every or retention.best:
            # A damaged checkpoint must not count as the best in place of a valid checkpoint.
            metas = {known: manifest.meta for known, manifest in store.valid().items()}
        store.prune(retention.keep, protect={step, *retention.protected(metas)})

    return after_commit
