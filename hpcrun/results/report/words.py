"""Metrics and numbers in words, for pages and terminals."""

from __future__ import annotations

_NAMES = {
    "loss": "training loss",
    "validation_loss": "validation loss",
    "lr": "learning rate",
    "mfu": "model FLOP/s utilization",
    "gpu_utilization": "GPU utilization (%)",
    "lowest_gpu_utilization": "lowest GPU utilization (%)",
    "memory_gb": "memory (GB)",
    "step_time": "step time (s)",
    "data_wait": "wait for data (s)",
}
_UNITS = ((86400.0 * 3, 86400.0, "days"), (7200.0, 3600.0, "hours"), (300.0, 60.0, "minutes"))


def metric_label(metric: str) -> str:
    """Return a metric in words, with its unit."""
    if metric.endswith("_per_second"):
        return f"{metric.removesuffix('_per_second').replace('_', ' ')} per second"
    return _NAMES.get(metric, metric.replace("_", " "))


def several(count: int, noun: str) -> str:
    """Return a count with its noun."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def duration(seconds: float) -> str:
    """Return seconds in words, such as 20.3 minutes."""
    for least, scale, unit in _UNITS:
        if seconds >= least:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds:.3g} seconds"
