"""The tasks of a Slurm job array, each an element of a sweep.

The index of a task is the end of its element's name, so that a person finds job 123_7 in ``SWEEP/007``.
Slurm allows indices below MaxArraySize only. A larger sweep becomes several arrays. The
first digits of their elements are the ``prefix``: index 234 of the array with the prefix 1 is element 1234.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from hpcrun import slurm
from hpcrun.errors import LaunchError
from hpcrun.run.directory import RunDirectory
from hpcrun.run.events import Reader, read_events

DIGITS = 3
"""The least number of digits of an element's name."""
_SLURMS_DEFAULT = 1001
_MAX_ARRAY = re.compile(r"^MaxArraySize\s*=\s*(\d+)\s*$", re.MULTILINE)


@dataclass(frozen=True)
class ArrayTasks:
    """One array. ``at_once``: tasks that may run at the same time; None: as many as Slurm starts.

    ``packs``: the elements of each task, where several share it; the first of them gives the task its index.
    """

    prefix: str
    width: int
    indices: Sequence[int]
    at_once: int | None = None
    packs: Sequence[Sequence[str]] = ()

    @property
    def tasks(self) -> list[tuple[int, Sequence[str]]]:
        """Return the index of each task with the names of its elements."""
        names = [[f"{self.prefix}{index:0{self.width}d}"] for index in self.indices]
        return list(zip(self.indices, self.packs or names, strict=True))

    @property
    def pack(self) -> int:
        """Maximum number of elements per task."""
        return max(map(len, self.packs), default=1)

    @property
    def elements(self) -> list[tuple[str, int]]:
        """Return the name of each element with the index of its task."""
        return [(name, index) for index, names in self.tasks for name in names]

    @property
    def names(self) -> list[str]:
        """The names of the elements."""
        return [name for name, _ in self.elements]

    @property
    def option(self) -> str:
        """The value of sbatch's ``--array``, such as ``0-3,7%2``."""
        limit = "" if self.at_once is None else f"%{self.at_once}"
        return ",".join(_spans(self.indices)) + limit

    @property
    def shell_name(self) -> str:
        """Shell expression for the name of the element in the batch script."""
        return f'{self.prefix}$(printf %0{self.width}d "$SLURM_ARRAY_TASK_ID")'

    @property
    def pattern(self) -> str:
        """The name of the element in Slurm's file names (sbatch(1), "filename pattern")."""
        return f"{self.prefix}%{self.width}a"


def element_name(number: int) -> str:
    """Return the name of the element with this number: 000, 001, … 999, 1000."""
    return f"{number:0{DIGITS}d}"


def arrays(
    numbers: Sequence[int], largest: int, at_once: int | None = None, pack: int = 1
) -> list[ArrayTasks]:
    """Return the arrays for the elements with these numbers.

    Args:
        largest: Slurm's MaxArraySize: all indices are below.
        at_once: see :class:`ArrayTasks`; the limit of each array.
        pack: maximum number of elements per task.

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
    packs: dict[tuple[str, int], list[list[str]]] = {}
    ordered = sorted(numbers)
    for at in range(0, len(ordered), pack):
        number = ordered[at]
        name = element_name(number)
        # The first array has no prefix: its names may be longer than its width.
        whole = number < 10**digits and digits >= DIGITS
        prefix, width = ("", DIGITS) if whole else (name[:-digits], digits)
        found.setdefault((prefix, width), []).append(number % 10**digits)
        names = [element_name(one) for one in ordered[at : at + pack]]
        packs.setdefault((prefix, width), []).append(names)
    return [
        ArrayTasks(*key, indices, at_once, packs[key] if pack > 1 else ())
        for key, indices in found.items()
    ]


def max_array_size(cluster: str | None = None) -> int:
    """Return MaxArraySize of the cluster; Slurm's default if no controller answers."""
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


class SignalUnanswered(LaunchError):
    """Slurm did not answer, so the ranks may have received a signal or not."""


def is_packed(run: RunDirectory, job: str, read: Reader = read_events) -> bool:
    """Return True if other runs share the job of ``run``."""
    return any(
        event.what == "submitted"
        and event.attempt is not None
        and event.attempt.job == job
        and "pack" in event.fields
        for event in read(run)
    )


def steps_of(run: RunDirectory, job: str, cluster: str | None) -> list[int]:
    """Return the numbers of the steps with the ranks of ``run``.

    Raises:
        LaunchError: the ranks have not started, or have ended; or Slurm does not answer.
    """
    listed = slurm.run(slurm.squeue_steps_command(job, cluster))
    if listed.returncode != 0 and not slurm.is_unknown_job(listed):
        raise LaunchError(
            f"{run.name}: Slurm does not say whether its ranks run in job {job} "
            f"({' '.join(listed.stderr.split())}); nothing was done: try again later"
        )
    steps = slurm.parse_steps(listed.stdout, run.path.name)
    if not steps:
        raise LaunchError(
            f"{run.name}: has no ranks in job {job} now; other runs share the job: try again later, or "
            f"cancel the whole sweep with `hpcrun cancel {run.name.partition('/')[0]}`"
        )
    return steps


def signal_steps(job: str, steps: Sequence[int], name: str, cluster: str | None) -> None:
    """Send the signal ``name`` to ``steps`` of the job.

    Raises:
        SignalUnanswered: Slurm does not answer, so the ranks may have received the signal or not.
        LaunchError: Slurm refuses; the text has its message.
    """
    for step in steps:
        command = slurm.scancel_command(job, signal=name, step=step, cluster=cluster)
        answer = slurm.run(command)
        if answer.returncode == slurm.TIMED_OUT:
            raise SignalUnanswered(
                f"{answer.stderr}: the ranks may have received SIG{name} or not; run the same command again"
            )
        if answer.returncode != 0:
            raise LaunchError(f"{command[0]}: {' '.join(answer.stderr.split())}")
