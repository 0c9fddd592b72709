"""Which checkpoints stay: the newest, every n-th, the best."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hpcrun.checkpoint.storage.errors import CheckpointError
from hpcrun.checkpoint.storage.store import CheckpointStore


@dataclass(frozen=True)
class Retention:
    """``keep`` newest, those at multiples of ``every`` steps (0: none), and the ``best`` by a metric.

    ``metric`` names a number in the manifests' ``meta``; a smaller one is better, or a larger one where
    the name begins with ``-`` (``-accuracy``). ``keep`` below 1 is a CheckpointError.
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
        """The steps that stay whatever their age, of valid checkpoints with these ``meta``."""
        stay = {step for step in metas if self.every and step % self.every == 0}
        name, sign = self.metric.removeprefix("-"), -1.0 if self.metric.startswith("-") else 1.0
        scores = []
        for step, meta in metas.items():
            value = meta.get(name)
            if isinstance(value, int | float) and math.isfinite(value):
                # Of equal ones the later is better: it has seen more.
                scores.append((sign * value, -step))
        return stay | {-step for _, step in sorted(scores)[: self.best]}


def tidying(store: CheckpointStore, retention: Retention) -> Callable[[int], list[str]]:
    """What rank 0 does after the commit of a step: prune. Raises CheckpointError."""

    def tidy(step: int) -> list[str]:
        metas: dict[int, Mapping[str, Any]] = {}
        if retention.every or retention.best:
            # A damaged one would stand as the best in the place of one that can be loaded.
            metas = {known: manifest.meta for known, manifest in store.valid().items()}
        store.prune(retention.keep, protect={step, *retention.protected(metas)})
        return []

    return tidy
