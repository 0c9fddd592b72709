"""Batches for each rank: order, streams, workers, division into micro-batches."""

from typing import Any


def __getattr__(name: str) -> Any:
    """Return ``training_steps``, which older programs import from here instead of from ``hpcrun``."""
    if name == "training_steps":
        from hpcrun.train.data.batches import training_steps

        return training_steps
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
