"""Pauses between questions to a scheduler about a job: Slurm answers everybody on the cluster."""

from collections.abc import Iterator

LONGEST = 60.0
"""Seconds between two questions to Slurm about a job in one state."""

_GROWTH = 1.25


def pauses(executor: str | None, first: float) -> Iterator[float]:
    """Seconds until each next question, without end.

    On Slurm each pause is a quarter longer than the one before, up to ``LONGEST``. The other executors'
    state is read from files of the run directory, always after ``first`` seconds.
    """
    while True:
        yield first
        if executor == "slurm":
            first = max(first, min(first * _GROWTH, LONGEST))
