"""The jobs of a hand-over: given to Slurm or this machine, recorded in the runs, ended after a failure."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TypedDict

from hpcrun.api.submission.run_directories import sync_file_system
from hpcrun.api.submission.run_list import RunList, RunToStart
from hpcrun.config import Config
from hpcrun.errors import LaunchError
from hpcrun.printing import say_aside
from hpcrun.run.attempt import Attempt
from hpcrun.run.journal.events import Submitted
from hpcrun.run.journal.journal import Journal
from hpcrun.slurm.launch.batch_script import ArrayTasks, job_name
from hpcrun.slurm.launch.slurm_submission import fitted_to_slurm, submit_slurm
from hpcrun.slurm.launch.submitted import JobOfRun, SubmittedJob, unrecorded, withdraw
from hpcrun.slurm.local.submission import submit_local


@dataclass(frozen=True)
class JobToSend:
    """A job for sbatch: of one run, or an array with a task for each of ``runs``.

    ``config``: that of a run, with the values that this cluster decides.
    """

    runs: Sequence[RunToStart]
    config: Config
    array: ArrayTasks | None


def jobs_to_send(
    wanted: RunList, runs: Sequence[RunToStart], *, submits: bool = False
) -> Sequence[JobToSend]:
    """Return the job for a run without siblings, or an array for each job section among ``runs``.

    Args:
        wanted: the list of which ``runs`` start.
        runs: the runs to start.
        submits: a submission follows, so the controller must answer.

    Raises:
        LaunchError: no node has the requested resources.
    """
    if wanted.alone is not None:
        return [JobToSend(runs, fitted_to_slurm(wanted.alone.config, submits=submits), None)]
    groups: dict[str, list[RunToStart]] = {}
    for one in runs:
        groups.setdefault(job_key(one.config), []).append(one)
    at_once = wanted.request.max_parallel
    if len(groups) > 1 and at_once is not None:
        raise LaunchError(
            "--max-parallel: limits one job array, and the runs differ in their job section; omit "
            "--max-parallel, or sweep the keys of job one by one"
        )
    found = []
    for group in groups.values():
        group.sort(key=lambda one: one.number)
        digests = [one.digest for one in group]
        tasks = ArrayTasks([one.number for one in group], at_once, digests)
        found.append(JobToSend(group, fitted_to_slurm(group[0].config, submits=submits), tasks))
    return found


def job_key(config: Config) -> str:
    """Return a text that is equal for configs with the same job section."""
    return config.job.model_dump_json()


@dataclass
class SentJobs:
    """The jobs that the scheduler has: ``of_runs``, and the ids of those ``withdrawn`` again."""

    of_runs: list[JobOfRun] = field(default_factory=list)
    withdrawn: list[str] = field(default_factory=list)

    @property
    def whole(self) -> Sequence[SubmittedJob]:
        """The jobs; the tasks of an array count as one job."""
        return list(dict.fromkeys(one.whole for one in self.of_runs))

    def withdraw(self) -> Sequence[JobOfRun]:
        """End all jobs, and forget those that have ended; return a run of each other job."""
        # Local job ids are unique only within a run.
        parts: dict[tuple[object, ...], list[JobOfRun]] = {}
        for one in self.of_runs:
            local = one.job.executor == "local"
            parts.setdefault((one.whole, one.run if local else None), []).append(one)
        left = []
        for tasks in parts.values():
            one = tasks[0]
            if withdraw(one.run, one.job.executor, one.whole.job_id):
                self.withdrawn.append(one.whole.job_id)
            else:
                left.append(tasks)
        self.of_runs = [one for tasks in left for one in tasks]
        return [tasks[0] for tasks in left]


@contextmanager
def withdrawn_on_failure(sent: SentJobs) -> Iterator[None]:
    """End the jobs that were submitted before a failure: hpcrun could neither find nor stop them later.

    Raises:
        LaunchError: the disk refused the record of a job, and the job cannot be ended.
    """
    try:
        yield
    except BaseException as error:
        left = sent.withdraw()
        sent.of_runs.clear()
        if left and isinstance(error, OSError):
            raise LaunchError(unrecorded(left, error)) from error
        for one in left:
            say_aside(
                f"hpcrun: job {one.whole.job_id} is submitted and still there; end it with "
                f"`{one.command_to_end}`"
            )
        raise


def send_to_slurm(wanted: RunList, arrays: Sequence[JobToSend], sent: SentJobs) -> None:
    """Submit the jobs; ``sent`` gets the job of each run.

    Raises:
        SubmissionUnanswered: sbatch got no answer.
        LaunchError: the scheduler refused.
        OSError: the folder cannot be written.
    """
    folder = wanted.folder
    for job in arrays:
        digest = "" if job.array else job.runs[0].digest
        made = submit_slurm(folder, job.config, job.array, digest)
        name = job_name(folder, job.config.job)
        for one in job.runs:
            number = f"{made.job_id}_{one.number}" if job.array else made.job_id
            sent.of_runs.append(JobOfRun(one.run, replace(made, job_id=number), name))


def send_here(wanted: RunList, runs: Sequence[RunToStart], sent: SentJobs) -> Callable[[], None]:
    """Submit the jobs to this machine; return the function that lets them begin.

    Raises:
        LaunchError: this machine cannot run the jobs.
        OSError: the disk refuses.
    """
    queue = None if wanted.alone else wanted.folder.logs
    pairs = [(one.run, one.config) for one in runs]
    ids, begin = submit_local(pairs, queue, wanted.request.max_parallel)
    for one, job in zip(runs, ids, strict=True):
        sent.of_runs.append(JobOfRun(one.run, SubmittedJob("local", job)))
    return begin


class _OfSlurm(TypedDict, total=False):
    """The fields of `Submitted` that only a job of Slurm has."""

    cluster: str
    name: str


def record(
    wanted: RunList, runs: Sequence[RunToStart], sent: SentJobs, cluster: str | None
) -> None:
    """Log the submission in each run.

    Raises:
        OSError: the disk refuses.
    """
    now, configs = round(time.time(), 3), {one.run: one.config for one in runs}
    for one in sent.of_runs:
        job = configs[one.run].job
        # An event without a value lacks its field.
        known = _OfSlurm()
        if cluster:
            known["cluster"] = cluster
        if one.name:
            known["name"] = one.name
        submitted = Submitted(
            time=now,
            attempt=Attempt(one.job.job_id, 0),
            executor=one.job.executor,
            nodes=job.nodes,
            gpus=job.gpus,
            **known,
        )
        Journal(one.run).append(submitted, durable=wanted.alone is not None)
    if wanted.alone is None:
        sync_file_system(wanted.folder.path)
