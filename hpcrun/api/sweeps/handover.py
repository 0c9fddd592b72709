"""Submission of the elements of a sweep, all or nothing: a failure leaves no half-made sweep."""

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from hpcrun.api.interrupts import noted
from hpcrun.api.submission.handover import ENDINGS, stop_if_interrupted, written
from hpcrun.api.sweeps.elements import (
    common_state,
    continued,
    made_folder,
    new_runs,
    sync_file_system,
    written_sweep_file,
)
from hpcrun.api.sweeps.plan import Planned, SweepPlan, job_key
from hpcrun.config import Config
from hpcrun.errors import LaunchError, SubmissionUnanswered
from hpcrun.printing import say_aside
from hpcrun.run.attempt import Attempt
from hpcrun.run.directory import RunDirectory
from hpcrun.run.journal.events import Submitted
from hpcrun.run.journal.journal import Journal
from hpcrun.run.record import SubmissionLock
from hpcrun.run.sweep_file import SweepFile
from hpcrun.run.trust import shared_parent_line
from hpcrun.slurm.launch import stopping, submission
from hpcrun.slurm.launch.batch_script import ArrayTasks, job_name
from hpcrun.slurm.launch.slurm_jobs import SubmittedJob
from hpcrun.slurm.launch.slurm_submission import fitted_to_slurm, submit_slurm
from hpcrun.slurm.local.submission import submit_local_sweep


@dataclass(frozen=True)
class SubmittedSweep:
    """Result of a submission: the decision on each element, and the jobs."""

    planned: Sequence[Planned]
    jobs: Sequence[SubmittedJob]


@dataclass(frozen=True)
class SweepArray:
    """An array to submit, and the config of its jobs with the values that this cluster decides."""

    tasks: ArrayTasks
    fitted: Config


@dataclass(frozen=True)
class _Given:
    """The job of one element: its id, and its name in Slurm."""

    planned: Planned
    job: SubmittedJob
    name: str | None = None

    @property
    def whole(self) -> SubmittedJob:
        """The job; the tasks of an array count as one job."""
        return replace(self.job, job_id=self.job.job_id.partition("_")[0])


def submit_sweep(plan: SweepPlan) -> SubmittedSweep:
    """Submit the elements of the sweep that are missing or have failed.

    Raises:
        OSError: the folder cannot be written; nothing has changed.
        UserError: another process submits the sweep now, an element is a run of another config, or the
            scheduler refuses; nothing has changed.
        KeyboardInterrupt: Ctrl-C or SIGTERM during the call; nothing has changed, or the text names the
            jobs that stay.
    """
    given: list[_Given] = []
    folder = RunDirectory(plan.folder)
    with noted(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as signals:
        new = not plan.folder.exists()
        with made_folder(plan.folder), SubmissionLock(folder):
            sweep, planned = plan.decided()
            wanted = [one for one in planned if one.submitted]
            if wanted:
                _submit(plan, sweep, wanted, signals, given)
        handed = list(dict.fromkeys(one.whole for one in given))
        if given and not ENDINGS.isdisjoint(signals):
            reported = ", ".join(job.job_id for job in handed[:3])
            raise KeyboardInterrupt(f"job {reported} is submitted and stays; `scancel` ends it")
    if new and (line := shared_parent_line(plan.folder)):
        say_aside(f"hpcrun: {line}")
    for number in signals:
        signal.raise_signal(number)
    return SubmittedSweep(planned, handed)


def _submit(
    plan: SweepPlan,
    sweep: SweepFile,
    wanted: Sequence[Planned],
    signals: list[signal.Signals],
    given: list[_Given],
) -> None:
    """Make the run directories of ``wanted`` and submit them; add the job of each to ``given``."""

    arrays = sweep_arrays(plan, wanted, submits=True) if plan.executor == "slurm" else {}
    fitted = {key: array.fitted for key, array in arrays.items()}
    new = [one for one in wanted if one.action == "new"]
    again = [one for one in wanted if one.action == "again"]
    unanswered: SubmissionUnanswered | None = None
    with ExitStack() as stack:
        stack.enter_context(written_sweep_file(sweep))
        stack.enter_context(written(plan.folder, plan.request.files))
        common = stack.enter_context(common_state(plan, again, fitted))
        for one in again:
            stack.enter_context(continued(one, common))
        stack.enter_context(new_runs(plan.folder, new, common))
        stop_if_interrupted(signals)
        stack.enter_context(_withdrawn_on_failure(given))
        # Query the cluster's name first: the events must follow the submission without a pause.
        cluster = submission.own_cluster() if plan.executor == "slurm" else None
        begin: Callable[[], None] | None = None
        if plan.executor == "slurm":
            try:
                for array in arrays.values():
                    given += _submitted_array(plan, array, wanted)
            except SubmissionUnanswered as error:
                # Slurm may have the array: its run directories and its script stay.
                unanswered = error
        else:
            runs = [(one.run, one.element.config) for one in wanted]
            logs = RunDirectory(plan.folder).logs
            ids, begin = submit_local_sweep(logs, runs, plan.request.max_parallel)
            for one, job in zip(wanted, ids, strict=True):
                given.append(_Given(one, SubmittedJob("local", job)))
        _record(plan, given, cluster)
        if signal.SIGINT in signals and unanswered is None:
            stop_if_interrupted(signals)
        if begin is not None:
            begin()
    if unanswered is not None:
        raise unanswered


@contextmanager
def _withdrawn_on_failure(given: list[_Given]) -> Iterator[None]:
    """End the jobs that were submitted before a failure: an array once, and on this machine every job."""
    try:
        yield
    except BaseException:
        # Local job ids are unique only within a run.
        ends = {
            (one.whole, one.planned.run.path if one.job.executor == "local" else None): one
            for one in given
        }
        for (job, _), one in ends.items():
            run = one.planned.run
            if not stopping.withdraw(run, job.executor, job.job_id):
                slurms = job.executor == "slurm"
                end = f"scancel {job.job_id}" if slurms else f"hpcrun cancel {run.path}"
                say_aside(
                    f"hpcrun: job {job.job_id} is submitted and still there; end it with `{end}`"
                )
        given.clear()
        raise


def sweep_arrays(
    plan: SweepPlan, wanted: Sequence[Planned], *, submits: bool = False
) -> dict[str, SweepArray]:
    """Return the array for each job section among ``wanted``, by :func:`job_key`.

    Args:
        submits: a submission follows, so the controller must answer.

    Raises:
        LaunchError: no node has the requested resources.
    """
    keys = dict.fromkeys(job_key(one.element.config) for one in wanted)
    at_once = plan.request.max_parallel
    if len(keys) > 1 and at_once is not None:
        raise LaunchError(
            "--max-parallel: limits one job array, and the runs differ in their job section; omit "
            "--max-parallel, or sweep the keys of job one by one"
        )
    found = {}
    for key in keys:
        mine = [one for one in wanted if job_key(one.element.config) == key]
        mine.sort(key=lambda one: one.number)
        digests = [one.element.digest for one in mine]
        tasks = ArrayTasks([one.number for one in mine], at_once, digests)
        fitted = fitted_to_slurm(mine[0].element.config, submits=submits)
        found[key] = SweepArray(tasks, fitted)
    return found


def _submitted_array(
    plan: SweepPlan,
    array: SweepArray,
    wanted: Sequence[Planned],
) -> list[_Given]:
    """Submit one array; return the job of each of its elements."""
    folder = RunDirectory(plan.folder)
    job = submit_slurm(folder, array.fitted, array.tasks)
    name, elements = job_name(folder, array.fitted.job), {one.number: one for one in wanted}
    return [
        _Given(elements[index], replace(job, job_id=f"{job.job_id}_{index}"), name)
        for index in array.tasks.indices
    ]


def _record(
    plan: SweepPlan,
    given: Sequence[_Given],
    cluster: str | None,
) -> None:
    """Log the submission in each element; raises OSError if the disk refuses."""
    now = round(time.time(), 3)
    for one in given:
        job = one.planned.element.config.job
        known: dict[str, Any] = {
            **({"cluster": cluster} if cluster else {}),
            **({"name": one.name} if one.name else {}),
        }
        submitted = Submitted(
            time=now,
            attempt=Attempt(one.job.job_id, 0),
            executor=plan.executor,
            nodes=job.nodes,
            gpus=job.gpus,
            **known,
        )
        Journal(one.planned.run).append(submitted, durable=False)
    sync_file_system(plan.folder)
