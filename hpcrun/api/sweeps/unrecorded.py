"""Job arrays without a record: the submission was killed between sbatch and the events of the elements, or
sbatch got no answer.

A submission first writes each array into ``sweep.json``, without a job. The batch script of each array is in
a separate folder (:func:`~hpcrun.slurm.launch.slurm_jobs.submitit_folder`), and Slurm reports each script.
So the next command finds the array, and records what the killed submission did not record.
"""

import contextlib
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from hpcrun import slurm
from hpcrun.config import load_resolved
from hpcrun.errors import UserError
from hpcrun.run.directory import RunDirectory, RunError
from hpcrun.run.events import read_events
from hpcrun.run.files import append_line
from hpcrun.run.record import SubmissionLock
from hpcrun.run.sweep_file import SweepFile, SweepSubmission, read_sweep, write_sweep
from hpcrun.slurm.launch.batch_script import job_name, wanted_cluster
from hpcrun.slurm.launch.slurm_jobs import submitit_folder

_PATIENCE = 6.0
# Seconds after which a request that sbatch has sent no longer reaches the controller.
_ARRIVES = 120.0


def record_killed_submission(folder: Path) -> None:
    """Record the arrays of a killed submission of the sweep in ``folder``; do nothing if there is none.

    For a command that only reads: a folder that cannot be written, a running submission and a silent Slurm
    leave everything as it is.
    """
    with contextlib.suppress(UserError, OSError):
        sweep = read_sweep(folder)
        if sweep is not None and not all(one.jobs for one in sweep.submissions):
            with SubmissionLock(RunDirectory(folder)):
                record_unrecorded(folder)


def record_unrecorded(folder: Path) -> None:
    """Record the arrays that a killed submission left in ``folder``; the caller holds the submission lock.

    Raises:
        RunError: Slurm does not answer, the sbatch of the killed submission still runs, its array may still
            arrive, or ``sweep.json`` is damaged.
        OSError: the sweep folder cannot be written.
    """
    sweep = read_sweep(folder)
    if sweep is None or all(one.jobs for one in sweep.submissions):
        return
    _refuse_running_sbatch(sweep.folder)
    recorded = {job for one in sweep.submissions for job in one.jobs}
    known = []
    for one in sweep.submissions:
        if one.jobs:
            known.append(one)
            continue
        found = [job for job in _jobs_of(sweep.folder, one) if job[0] not in recorded]
        if found:
            # Take the newest array: a failed submission may have left a cancelled array with the same first
            # run.
            job, cluster = max(found, key=lambda pair: int(pair[0]))
            _record(sweep, one, job, cluster)
            known.append(replace(one, jobs=[job], unanswered=False))
        elif one.unanswered and time.time() - one.time < _ARRIVES:
            raise RunError(
                f"{folder}: sbatch got no answer at {time.strftime('%H:%M:%S', time.localtime(one.time))}, "
                "and Slurm may still get the array; submit again in two minutes"
            )
    write_sweep(replace(sweep, submissions=known))


def _jobs_of(folder: Path, one: SweepSubmission) -> list[tuple[str, str | None]]:
    """Return the arrays that Slurm has for the submission, each with its cluster if Slurm names it."""
    # The element may be missing: the submission was killed before its run directory was made.
    config = RunDirectory(folder / one.elements[0]).config
    cluster = wanted_cluster(load_resolved(config).job) if config.exists() else None
    scripts = submitit_folder(RunDirectory(folder), one.elements[0])
    command = slurm.squeue_scripts_command(_submitters(scripts), cluster)
    listed = slurm.run(command, timeout=_PATIENCE)
    if listed.returncode != 0:
        raise RunError(
            f"{folder}: the previous submission was killed, and Slurm does not say whether it left an array "
            f"({' '.join(listed.stderr.split())}); submit again when Slurm answers"
        )
    return [
        (job, place)
        for job, script, place in slurm.parse_scripts(listed.stdout)
        if Path(script).parent.resolve() == scripts.resolve()
    ]


def _submitters(scripts: Path) -> list[int]:
    """Return the numbers of the users who have submitted an array with a script in this folder."""
    owners = {path.stat().st_uid for path in scripts.glob("*.sh")}
    return sorted(owners | {os.getuid()})


def _record(sweep: SweepFile, one: SweepSubmission, job: str, cluster: str | None) -> None:
    """Log the submission in each element that does not have it."""
    here = cluster or slurm.cluster_name()
    now = round(time.time(), 3)
    pack = max(Counter(one.tasks).values(), default=1)
    for run, number in _tasks(sweep, one):
        task = f"{job}_{number}"
        # A person may have deleted the run; the next submission makes it again.
        if not run.exists():
            continue
        if any(event.attempt and event.attempt.job == task for event in read_events(run)):
            continue
        config = load_resolved(run.config).job
        line = {
            "time": now,
            "event": "submitted",
            "executor": "slurm",
            "job": task,
            "nodes": config.nodes,
            "gpus": config.gpus,
            "name": job_name(RunDirectory(sweep.folder), config),
            **({"pack": pack} if pack > 1 else {}),
            **({"cluster": here} if here else {}),
        }
        append_line(run.events, line)


def _tasks(sweep: SweepFile, one: SweepSubmission) -> Iterator[tuple[RunDirectory, int]]:
    for name, number in zip(one.elements, one.tasks, strict=False):
        yield RunDirectory(sweep.folder / name), number


def _refuse_running_sbatch(folder: Path) -> None:
    """Raise RunError while the sbatch of a killed submission runs here: its array may appear at any time."""
    import psutil

    scripts = str(submitit_folder(RunDirectory(folder)))
    for process in psutil.process_iter(["cmdline", "pid"]):
        words: Sequence[str] = process.info["cmdline"] or ()
        if any(word.startswith(f"{scripts}/") for word in words):
            raise RunError(
                f"{folder}: sbatch of a killed submission still runs (process {process.pid}); wait for its "
                "end, or end it"
            )
