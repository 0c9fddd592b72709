"""Submission of the elements of a sweep, all or nothing: a failure leaves no half-made sweep."""

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpcrun import slurm
from hpcrun.api.interrupts import noted
from hpcrun.api.submission.handover import ENDINGS, stop_if_interrupted
from hpcrun.api.sweeps.elements import (
    admitted,
    code_copy,
    fitted_configs,
    identity_of,
    job_key,
    new_run,
    no_new_logs_on_failure,
    shared_code,
    written_sweep_file,
)
from hpcrun.api.sweeps.folder import made_folder, new_runs, sync_file_system
from hpcrun.api.sweeps.plan import Planned, SweepPlan, groups, shared_job
from hpcrun.api.sweeps.unrecorded import refuse_unrecorded
from hpcrun.config import Config
from hpcrun.errors import SubmissionUnanswered
from hpcrun.printing import say_aside
from hpcrun.run.directory import RunDirectory, RunError
from hpcrun.run.files import append_line
from hpcrun.run.record import SubmissionLock
from hpcrun.run.sweep_file import SweepFile, SweepSubmission, write_sweep
from hpcrun.slurm.launch import stopping
from hpcrun.slurm.launch.array import ArrayTasks, arrays, max_array_size
from hpcrun.slurm.launch.batch_script import job_name, wanted_cluster
from hpcrun.slurm.launch.slurm_jobs import Submitted
from hpcrun.slurm.launch.slurm_submission import submit_slurm
from hpcrun.slurm.launch.stopping import with_dependency
from hpcrun.slurm.local.submission import submit_local_sweep


@dataclass(frozen=True)
class SubmittedSweep:
    """Result of a submission: the decision on each element, and the jobs."""

    planned: Sequence[Planned]
    jobs: Sequence[Submitted]


@dataclass(frozen=True)
class _Given:
    """The job of one element. ``pack``: the maximum number of runs per job of its array."""

    planned: Planned
    job: Submitted
    name: str | None
    pack: int


def submit_sweep(
    plan: SweepPlan, after: Sequence[RunDirectory] = (), *, trust_owner: bool = False
) -> SubmittedSweep:
    """Submit the elements of the sweep that are missing or have failed.

    Args:
        after: runs that must finish first.
        trust_owner: continue elements of another user.

    Raises:
        UserError: another process submits the sweep now, an element is a run of another config, the folder
        cannot be
            written, or the scheduler refuses; nothing has changed.
        KeyboardInterrupt: Ctrl-C or SIGTERM during the call; nothing has changed, or the text names the
            jobs that stay.
    """
    given: list[_Given] = []
    with noted(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as signals:
        with (
            _disk_errors(plan.folder),
            made_folder(plan.folder),
            SubmissionLock(RunDirectory(plan.folder)),
        ):
            refuse_unrecorded(plan.folder)
            sweep, planned = plan.decided()
            wanted = [one for one in planned if one.submitted]
            if wanted:
                _submit(plan, sweep, wanted, after, trust_owner, signals, given)
        handed = _distinct([one.job for one in given])
        if given and not ENDINGS.isdisjoint(signals):
            told = ", ".join(job.job_id for job in handed[:3])
            raise KeyboardInterrupt(f"job {told} is submitted and stays; `scancel` ends it")
    for number in signals:
        signal.raise_signal(number)
    return SubmittedSweep(planned, handed)


def _submit(
    plan: SweepPlan,
    sweep: SweepFile,
    wanted: Sequence[Planned],
    after: Sequence[RunDirectory],
    trust_owner: bool,
    signals: list[signal.Signals],
    given: list[_Given],
) -> None:
    """Make the run directories of ``wanted`` and submit them; add the job of each to ``given``."""

    def interrupted() -> bool:
        return not ENDINGS.isdisjoint(signals)

    fitted = fitted_configs(plan, wanted, interrupted)
    parts = _arrays(plan, wanted, fitted)
    new = [one for one in wanted if one.action == "new"]
    again = [one for one in wanted if one.action == "again"]
    with ExitStack() as stack:
        # Written before sbatch, so that the next submission finds the array of a killed submission.
        begun = replace(sweep, submissions=[*sweep.submissions, *map(_unrecorded, parts)])
        stack.enter_context(written_sweep_file(begun))
        snapshot = stack.enter_context(code_copy(plan, again))
        identity = identity_of(plan)
        for one in again:
            stack.enter_context(
                admitted(one, snapshot, identity, plan.snapshot, trust_owner, fitted)
            )
        facts = identity[0] | {
            "snapshot": plan.snapshot,
            "code": shared_code(plan.folder, snapshot),
        }
        made = [new_run(one, fitted) for one in new]
        stack.enter_context(new_runs(plan.folder, made, facts, identity[1]))
        stop_if_interrupted(signals)
        stack.enter_context(no_new_logs_on_failure(plan.folder))
        stack.enter_context(_withdrawn_on_failure(given))
        # Query the cluster's name first: the events must follow the submission without a pause.
        cluster = slurm.cluster_name() if plan.executor == "slurm" else None
        begin: Callable[[], None] | None = None
        silent: SweepSubmission | None = None
        if plan.executor == "slurm":
            silent = _to_slurm(plan, wanted, parts, after, interrupted, given)
        else:
            begin = _to_this_machine(plan, wanted, after, given)
        _record(plan, sweep, given, after, cluster, silent)
        # A withdrawal would remove the record of an array that Slurm may have.
        if signal.SIGINT in signals and silent is None:
            stop_if_interrupted(signals)
        if begin is not None:
            begin()
    if silent is not None:
        raise RunError(
            f"{plan.folder}: sbatch got no answer, so Slurm may have the array or not; run "
            "the same command again in two minutes: it names the array, or submits the runs"
        )


@contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunError(
            f"{error.filename or folder}: cannot be written: {error.strerror or error}; free some space "
            "there, or choose another place with --runs-dir"
        ) from error


@contextmanager
def _withdrawn_on_failure(given: list[_Given]) -> Iterator[None]:
    """End the jobs that were submitted before a failure."""
    try:
        yield
    except BaseException:
        for job, run in _to_withdraw(given):
            if not stopping.withdraw(run, job.executor, job.job_id, job.cluster):
                end = (
                    f"scancel {job.job_id}"
                    if job.executor == "slurm"
                    else f"hpcrun cancel {run.path}"
                )
                say_aside(
                    f"hpcrun: job {job.job_id} is submitted and still there; end it with `{end}`"
                )
        given.clear()
        raise


def _to_withdraw(given: Sequence[_Given]) -> list[tuple[Submitted, RunDirectory]]:
    """Return each job with a run of it: an array once, and on this machine the job of every element.

    Cancelling an array by its number ends all its tasks. Local job ids are unique only within a run.
    """
    if any(one.job.executor == "local" for one in given):
        return [(one.job, one.planned.run) for one in given]
    return list({_whole(one.job): one.planned.run for one in given}.items())


def _arrays(
    plan: SweepPlan, wanted: Sequence[Planned], fitted: dict[str, Config]
) -> list[tuple[Config, ArrayTasks]]:
    """Return one array for each job section, or several arrays if there are too many elements for one."""
    if plan.executor != "slurm":
        return []
    largest = max_array_size(wanted_cluster(plan.config.job))
    found = []
    for key, config in fitted.items():
        mine = [one for one in wanted if job_key(one.element.config) == key]
        own = mine[0].element.config.job
        for numbers, pack in groups([one.number for one in mine], plan.pack, plan.at_once):
            shared = config.model_copy(update={"job": shared_job(config.job, pack, own)})
            found += [
                (shared, array) for array in arrays(numbers, largest, plan.tasks_at_once, pack)
            ]
    return found


def _unrecorded(part: tuple[Config, ArrayTasks]) -> SweepSubmission:
    """Return the entry of ``sweep.json`` for an array that sbatch has not accepted yet."""
    names, tasks = zip(*part[1].elements, strict=True)
    return SweepSubmission(round(time.time(), 3), "slurm", [], names, tasks)


def _to_slurm(
    plan: SweepPlan,
    wanted: Sequence[Planned],
    parts: Sequence[tuple[Config, ArrayTasks]],
    after: Sequence[RunDirectory],
    interrupted: Callable[[], bool],
    given: list[_Given],
) -> SweepSubmission | None:
    """Submit ``wanted`` as the arrays ``parts``; return the entry of an array without an answer."""
    folder, before = RunDirectory(plan.folder), None
    by_name = {one.run.path.name: one for one in wanted}
    for config, array in parts:
        asked = with_dependency(config, after)
        if plan.at_once is not None and before is not None:
            # Slurm limits the tasks of each array separately, so a limit for all arrays needs one array
            # after the other.
            asked = _after_array(config, before)
        try:
            job = submit_slurm(folder, asked, interrupted, array)
        except SubmissionUnanswered:
            return _unrecorded((config, array))
        before = job.job_id
        given += _tasks(array, job, by_name, job_name(folder, config.job))
    return None


def _after_array(config: Config, before: str) -> Config:
    """Return ``config`` with the additional dependency on the end of the array ``before``."""
    head, mine = "--dependency=", f"afterany:{before}"
    options = [*config.job.sbatch_args]
    at = next((at for at, option in enumerate(options) if option.startswith(head)), None)
    # sbatch obeys only the last --dependency.
    if at is None:
        options.append(head + mine)
    else:
        options[at] += f",{mine}"
    return config.model_copy(update={"job": config.job.model_copy(update={"sbatch_args": options})})


def _tasks(
    array: ArrayTasks, job: Submitted, by_name: dict[str, Planned], name: str
) -> list[_Given]:
    return [
        _Given(by_name[element], replace(job, job_id=f"{job.job_id}_{index}"), name, array.pack)
        for element, index in array.elements
    ]


def _to_this_machine(
    plan: SweepPlan,
    wanted: Sequence[Planned],
    after: Sequence[RunDirectory],
    given: list[_Given],
) -> Callable[[], None]:
    """Submit ``wanted`` to the queue of this machine; return the function that starts the queue."""
    runs = [(one.run, one.element.config) for one in wanted]
    logs = RunDirectory(plan.folder).logs
    ids, begin = submit_local_sweep(logs, runs, after, plan.at_once, plan.pack)
    for one, job in zip(wanted, ids, strict=True):
        given.append(_Given(one, Submitted("local", job), None, plan.pack))
    return begin


def _record(
    plan: SweepPlan,
    sweep: SweepFile,
    given: Sequence[_Given],
    after: Sequence[RunDirectory],
    here: str | None,
    silent: SweepSubmission | None,
) -> None:
    """Log the submission in each element and in ``sweep.json``; raises OSError if the disk refuses.

    Args:
        silent: the array for which sbatch got no answer.
    """
    now = round(time.time(), 3)
    facts: dict[str, Any] = {"after": [str(run.path) for run in after]} if after else {}
    for one in given:
        job = one.planned.element.config.job
        cluster = one.job.cluster or here
        line = {
            "time": now,
            "event": "submitted",
            "executor": plan.executor,
            "job": one.job.job_id,
            "nodes": job.nodes,
            "gpus": job.gpus,
            **facts,
            **({"pack": one.pack} if one.pack > 1 else {}),
            **({"cluster": cluster} if cluster else {}),
            **({"name": one.name} if one.name else {}),
        }
        append_line(one.planned.run.events, line)
    names = [one.planned.run.path.name for one in given]
    ids = [job.job_id for job in _distinct([one.job for one in given])]
    sent = [SweepSubmission(now, plan.executor, ids, names)] if ids else []
    left = [silent] if silent is not None else []
    # The events first: an entry with jobs in sweep.json means that all events are written.
    sync_file_system(plan.folder)
    write_sweep(replace(sweep, submissions=[*sweep.submissions, *sent, *left]))


def _distinct(given: Sequence[Submitted]) -> list[Submitted]:
    """Return the jobs; the tasks of an array count as one job."""
    return list(dict.fromkeys(map(_whole, given)))


def _whole(job: Submitted) -> Submitted:
    return replace(job, job_id=job.job_id.partition("_")[0])
