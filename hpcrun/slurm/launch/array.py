"""The tasks of a Slurm job array, each an element of a sweep.

The index of a task is the name of its element, so that a person finds job 123_7 in ``SWEEP/007``.
"""

from collections.abc import Sequence
from dataclasses import dataclass

_DIGITS = 3


@dataclass(frozen=True)
class ArrayTasks:
    """One array. ``at_once``: tasks that may run at the same time; None: as many as Slurm starts."""

    indices: Sequence[int]
    at_once: int | None = None

    @property
    def option(self) -> str:
        """The value of sbatch's ``--array``, such as ``0-3,7%2``."""
        limit = "" if self.at_once is None else f"%{self.at_once}"
        spans: list[list[int]] = []
        for index in self.indices:
            if spans and index == spans[-1][1] + 1:
                spans[-1][1] = index
            else:
                spans.append([index, index])
        return ",".join(f"{one}-{end}" if one != end else f"{one}" for one, end in spans) + limit

    @property
    def shell_name(self) -> str:
        """Shell expression for the name of the element in the batch script."""
        return f'$(printf %0{_DIGITS}d "$SLURM_ARRAY_TASK_ID")'

    @property
    def pattern(self) -> str:
        """The name of the element in Slurm's file names (sbatch(1), "filename pattern")."""
        return f"%{_DIGITS}a"


def element_name(number: int) -> str:
    """Return the name of the element with this number: 000, 001, … 999, 1000."""
    return f"{number:0{_DIGITS}d}"
