"""Pauses between questions to a scheduler about a job: all users of the cluster share slurmctld."""

from collections.abc import Iterator

LONGEST = 60.0
"""Seconds between two questions to Slurm about a job in one state."""

_GROWTH = 1.25


def pauses(executor: str | None, first: float) -> Iterator[float]:
    """Yield the seconds until each next question, without end.

    On Slurm each pause is a quarter longer than the previous pause, up to ``LONGEST``. The state on other
    executors is read from files of the run directory, always after ``first`` seconds.
    """
    while True:
        yield first
        if executor == "slurm":
            first = max(first, min(first * _GROWTH, LONGEST))
