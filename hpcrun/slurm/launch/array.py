"""The tasks of a Slurm job array, each an element of a sweep.

The index of a task is the name of its element, so that a person finds job 123_7 in ``SWEEP/007``.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from hpcrun import slurm
from hpcrun.errors import LaunchError

_DIGITS = 3
_SLURMS_DEFAULT = 1001
_MAX_ARRAY = re.compile(r"^MaxArraySize\s*=\s*(\d+)\s*$", re.MULTILINE)


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


def array_of(numbers: Sequence[int], largest: int, at_once: int | None = None) -> ArrayTasks:
    """Return the array of the elements with these numbers.

    Args:
        largest: Slurm's MaxArraySize: all indices are below.
        at_once: elements that may run at the same time.

    Raises:
        LaunchError: an index would be too large.
    """
    indices = sorted(numbers)
    if indices[-1] >= largest:
        raise LaunchError(
            f"MaxArraySize of this cluster is {largest}, so a sweep has the runs 000 to "
            f"{element_name(largest - 1)}; divide the values among several sweeps with --name"
        )
    return ArrayTasks(indices, at_once)


def max_array_size() -> int:
    """Return MaxArraySize of this cluster; Slurm's default if no controller answers."""
    shown = slurm.run(slurm.scontrol_show_config_command())
    found = _MAX_ARRAY.search(shown.stdout)
    return int(found[1]) if found else _SLURMS_DEFAULT
