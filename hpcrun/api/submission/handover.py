"""The hand-over of runs to the scheduler: a failure or an interruption leaves nothing half-made.

A run and the runs of a sweep go the same way: `hpcrun/api/submission/run_list.py:RunList` is the input.
"""

import signal
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from hpcrun.api.interrupts import noted
from hpcrun.api.places import handle
from hpcrun.api.submission.plan import SubmissionPlan
from hpcrun.api.submission.run_directories import contents, continued, made_folder, new_runs
from hpcrun.api.submission.run_list import RunList, RunToStart
from hpcrun.api.submission.sending import (
    SentJobs,
    jobs_to_send,
    record,
    send_here,
    send_to_slurm,
    withdrawn_on_failure,
)
from hpcrun.api.submission.undo import put_back_on_failure, written
from hpcrun.config import all_differences, load_resolved, to_yaml
from hpcrun.errors import SubmissionUnanswered
from hpcrun.printing import say_aside
from hpcrun.run.directory import RunDirectory, RunError
from hpcrun.run.record import SubmissionLock
from hpcrun.run.trust import shared_parent_line
from hpcrun.slurm.launch import jobs, submission
from hpcrun.slurm.launch.submitted import SubmittedJob

# SIGINT and SIGTERM end this command; SIGHUP (a closed terminal) does not.
_ENDINGS = frozenset({signal.SIGINT, signal.SIGTERM})


def submit_run(plan: SubmissionPlan) -> SubmittedJob | None:
    """Submit the run of ``plan``; None for ``prepared`` and ``debug``: no job.

    Raises:
        OSError: the run directory cannot be written; nothing has changed.
        UserError: a package is missing, the run belongs to another user, is running already, or cannot be
            submitted; nothing has changed.
        KeyboardInterrupt: Ctrl-C or SIGTERM; nothing has changed, or the text names the job that stays.
    """
    plan.require_packages()
    one = RunToStart(plan.run, plan.config, to_yaml(plan.config), plan.start)

    def choose() -> Sequence[RunToStart]:
        _refuse_live(one.run)
        return [one]

    given = hand_over(RunList(plan.request, plan.run, plan.executor, choose, alone=one))
    return given[0] if given else None


def hand_over(wanted: RunList) -> Sequence[SubmittedJob]:
    """Submit the runs that ``wanted`` chooses; return their jobs, the tasks of an array as one job.

    Raises:
        OSError: the folder cannot be written; nothing has changed.
        UserError: another process submits the runs now, a run is another user's or of another config, or the
            scheduler refuses; nothing has changed.
        KeyboardInterrupt: Ctrl-C or SIGTERM; nothing has changed, or the text names the jobs that stay.
    """
    folder, new, sent = wanted.folder, wanted.is_new, SentJobs()
    changed: Sequence[str] = ()
    with (
        noted(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as signals,
        made_folder(wanted, sent.withdrawn),
        SubmissionLock(folder),
    ):
        if runs := wanted.choose():
            for one in (known := [one for one in runs if one.run.exists()]):
                one.require_startable()
            if wanted.alone is not None:
                changed = all_differences(load_resolved(folder.config), wanted.alone.config)
            _prepare_and_send(wanted, runs, known, signals, sent)
    if new and (line := shared_parent_line(folder.path)):
        say_aside(f"hpcrun: {line}")
    if changed:
        say_aside(f"hpcrun: {folder.name}: continues with another config: {'; '.join(changed)}")
    if sent.of_runs and not _ENDINGS.isdisjoint(signals):
        stays = f"job {', '.join(job.job_id for job in sent.whole[:3])} is submitted and stays"
        raise KeyboardInterrupt(f"{stays}; `hpcrun cancel {handle(folder)}` ends it")
    for number in signals:
        signal.raise_signal(number)
    return sent.whole


def _prepare_and_send(
    wanted: RunList,
    runs: Sequence[RunToStart],
    known: Sequence[RunToStart],
    signals: list[signal.Signals],
    sent: SentJobs,
) -> None:
    """Prepare the run directories of ``runs`` and submit them; ``known`` exist already."""
    on_slurm = wanted.executor == "slurm"
    arrays = jobs_to_send(wanted, runs, submits=True) if on_slurm else []
    fitted = {one.run.path: job.config for job in arrays if job.array for one in job.runs}
    unanswered: SubmissionUnanswered | None = None
    with ExitStack() as stack:
        stack.enter_context(wanted.listed())
        stack.enter_context(written(wanted.folder.path, wanted.request.files))
        common = stack.enter_context(contents(wanted, known, fitted))
        for one in known:
            stack.enter_context(continued(one, common))
        stack.enter_context(new_runs(wanted, [one for one in runs if one not in known], common))
        stack.enter_context(put_back_on_failure(wanted.folder.batch_script))
        _stop_if_interrupted(signals)
        if wanted.executor not in ("slurm", "local"):
            return
        stack.enter_context(withdrawn_on_failure(sent))
        # Query the cluster's name first: the events must follow the submission without a pause.
        cluster = submission.own_cluster() if on_slurm else None
        begin: Callable[[], None] | None = None
        if on_slurm:
            try:
                send_to_slurm(wanted, arrays, sent)
            except SubmissionUnanswered as error:
                # Slurm may have the job: its run directories and its script stay.
                unanswered = error
        else:
            begin = send_here(wanted, runs, sent)
        record(wanted, runs, sent, cluster)
        if signal.SIGINT in signals and unanswered is None and not sent.withdraw():
            _stop_if_interrupted(signals)
        if begin is not None:
            begin()
    if unanswered is not None:
        raise unanswered


def _stop_if_interrupted(signals: Sequence[signal.Signals]) -> None:
    """Raise KeyboardInterrupt if one of ``signals`` wants this command to end."""
    if not _ENDINGS.isdisjoint(signals):
        raise KeyboardInterrupt("nothing was submitted")


def _refuse_live(run: RunDirectory) -> None:
    """Raise RunError if a job has ``run``."""
    now = jobs.state(run)
    if now.cluster is not None:
        raise RunError(
            f"{run.name}: job {now.job} on cluster {now.cluster} has it already; watch and end it there, or, "
            f"if that cluster is gone for good, write it off with `hpcrun cancel --now {handle(run)}`"
        )
    if now.live:
        raise RunError(
            f"{run.name}: job {now.job} has it already ({now.word}); watch it with `hpcrun logs -f "
            f"{handle(run)}`, end it with `hpcrun cancel {handle(run)}`, or choose another --name"
        )
