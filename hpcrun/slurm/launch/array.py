"""The tasks of a Slurm job array, each an element of a sweep.

The index of a task is the name of its element, so that a person finds job 123_7 in ``SWEEP/007``.
"""

import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcrun import slurm
from hpcrun.errors import LaunchError
from hpcrun.run.directory import RunDirectory, RunError
from hpcrun.run.sweep_file import read_sweep
from hpcrun.slurm.launch.slurm_jobs import PATIENCE, submitit_folder

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


def max_array_size(cluster: str | None = None) -> int:
    """Return MaxArraySize of the cluster; Slurm's default if no controller answers."""
    shown = slurm.run(slurm.scontrol_show_config_command(cluster))
    found = _MAX_ARRAY.search(shown.stdout)
    return int(found[1]) if found else _SLURMS_DEFAULT


# Seconds after which a request that sbatch has sent no longer reaches the controller.
_ARRIVES = 120.0
_CLUSTER = re.compile(r"^#SBATCH (?:--clusters|-M)[ =]?\"?([^\s\"]+)", re.MULTILINE)


def refuse_unrecorded(folder: RunDirectory) -> None:
    """Refuse a submission while Slurm has, or may get, an array that is not in ``sweep.json``.

    The submission of that array was killed after it wrote the script. squeue shows the path of each job's
    script, which identifies the sweep: a name is not unique, and a person can change it.

    Raises:
        RunError: Slurm has the array, does not answer, or may still get the array; or ``sweep.json`` is
            damaged.
        OSError: the folder cannot be read or written.
    """
    sweep = read_sweep(folder.path)
    recorded = {job for one in sweep.submissions for job in one.jobs} if sweep else set()
    for script in submitit_folder(folder).glob("*.sh"):
        # submitit writes .submission_file_ID.sh, and renames the file when sbatch has answered with the job.
        if script.is_symlink() or script.name.partition("_")[0] in recorded:
            continue
        found = sorted({*_jobs_of(folder, script)} - recorded, key=int)
        if found:
            raise RunError(
                f"{folder.path}: a submission was interrupted after Slurm accepted job {', '.join(found)}; "
                f"end it with `scancel {' '.join(found)}`, then submit again"
            )
        if script.name.startswith(".") and time.time() - script.stat().st_mtime < _ARRIVES:
            raise RunError(
                f"{folder.path}: a submission was interrupted less than two minutes ago, and Slurm may still "
                "get its array; submit again in two minutes"
            )
        script.unlink()


def _jobs_of(folder: RunDirectory, script: Path) -> list[str]:
    """Return the jobs in squeue whose script is in the folder of ``script``."""
    cluster = _CLUSTER.search(script.read_text())
    # Another user may have submitted the array.
    users = sorted({os.getuid(), script.stat().st_uid})
    command = slurm.squeue_scripts_command(users, cluster and cluster[1])
    listed = slurm.run(command, timeout=PATIENCE)
    if listed.returncode != 0:
        raise RunError(
            f"{folder.path}: a submission was interrupted, and Slurm does not say if it has an array of it "
            f"({' '.join(listed.stderr.split())}); submit again when Slurm answers"
        )
    jobs = slurm.parse_scripts(listed.stdout)
    place = script.parent.resolve()
    return [job for job, path, _ in jobs if Path(path).parent.resolve() == place]
