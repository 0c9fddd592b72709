"""The tasks of a Slurm job array, each an element of a sweep.

The index of a task is the end of its element's name, so that a person finds job 123_7 in ``SWEEP/007``.
Slurm allows indices below MaxArraySize only. A larger sweep becomes several arrays, whose first digits are
the ``prefix``: index 234 of the array with the prefix 1 is element 1234.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from hpcrun.cluster import slurm
from hpcrun.launch.errors import LaunchError

DIGITS = 3
"""The least number of digits of an element's name."""
_SLURMS_DEFAULT = 1001
_MAX_ARRAY = re.compile(r"^MaxArraySize\s*=\s*(\d+)\s*$", re.MULTILINE)


@dataclass(frozen=True)
class ArrayTasks:
    """One array. ``at_once``: tasks that may run at the same time; None: as many as Slurm starts."""

    prefix: str
    width: int
    indices: Sequence[int]
    at_once: int | None = None

    @property
    def names(self) -> list[str]:
        """The names of the elements, in the order of the indices."""
        return [f"{self.prefix}{index:0{self.width}d}" for index in self.indices]

    @property
    def option(self) -> str:
        """The value of sbatch's ``--array``, such as ``0-3,7%2``."""
        limit = "" if self.at_once is None else f"%{self.at_once}"
        return ",".join(_spans(self.indices)) + limit

    @property
    def shell_name(self) -> str:
        """A word of bash that is the name of the element in the batch script."""
        return f'{self.prefix}$(printf %0{self.width}d "$SLURM_ARRAY_TASK_ID")'

    @property
    def pattern(self) -> str:
        """The name of the element in Slurm's file names (sbatch(1), "filename pattern")."""
        return f"{self.prefix}%{self.width}a"


def element_name(number: int) -> str:
    """Return the name of the element with this number: 000, 001, … 999, 1000."""
    return f"{number:0{DIGITS}d}"


def arrays(numbers: Sequence[int], largest: int, at_once: int | None = None) -> list[ArrayTasks]:
    """Return the arrays for the elements with these numbers.

    Args:
        largest: Slurm's MaxArraySize: all indices are below.
        at_once: see :class:`ArrayTasks`; it holds for each array.

    Raises:
        LaunchError: the cluster allows no arrays of ten tasks.
    """
    if largest < 10:
        raise LaunchError(
            f"MaxArraySize of this cluster is {largest}: no job array is possible; submit the runs one by "
            "one, or use --executor local"
        )
    digits = len(str(largest)) - 1
    found: dict[tuple[str, int], list[int]] = {}
    for number in sorted(numbers):
        name = element_name(number)
        # The first array has no prefix: its names may be longer than its width.
        whole = number < 10**digits and digits >= DIGITS
        prefix, width = ("", DIGITS) if whole else (name[:-digits], digits)
        found.setdefault((prefix, width), []).append(number % 10**digits)
    return [ArrayTasks(*key, indices, at_once) for key, indices in found.items()]


def max_array_size(cluster: str | None = None) -> int:
    """Return MaxArraySize of the cluster; Slurm's default where no controller answers."""
    shown = slurm.run(slurm.scontrol_show_config_command(cluster))
    found = _MAX_ARRAY.search(shown.stdout)
    return int(found[1]) if found else _SLURMS_DEFAULT


def _spans(indices: Sequence[int]) -> list[str]:
    spans: list[list[int]] = []
    for index in indices:
        if spans and index == spans[-1][1] + 1:
            spans[-1][1] = index
        else:
            spans.append([index, index])
    return [str(first) if first == last else f"{first}-{last}" for first, last in spans]
