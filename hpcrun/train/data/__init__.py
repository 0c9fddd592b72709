"""Batches for each rank: sample order, streams, loader processes, micro-batches."""

from typing import Any


def __getattr__(name: str) -> Any:
    """Return ``training_steps``; older programs import it from here instead of from ``hpcrun``."""
    if name == "training_steps":
        from hpcrun.train.data.batches import training_steps

        return training_steps
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
