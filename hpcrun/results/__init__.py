"""Results of many runs: one HDF5 file, tidy frames, statistics over seeds.

    from hpcrun.results import load

    results = load("results.h5")
    results.metrics(columns=["loss"]).groupby("run").loss.min()

docs/results.md describes the file and the functions.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpcrun.results.frames import Results, load

__all__ = ["Results", "load"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hpcrun.results import frames

    return getattr(frames, name)
