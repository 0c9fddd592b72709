"""Judge an attempt that has ended: find the cause, write it down, and requeue
where the policy says so.

Batch scripts and the local cluster call it after the ranks have gone. Exit
code 75: the job is to be requeued, and whoever called must do it. 0: the
training is done, or the job has been requeued. Any other: this was the end,
and a failure (143: stopped on request), for a batch script to exit with.
"""

import argparse
import os
import sys
import time
from pathlib import Path
from typing import cast

from hpcrun.cluster import slurm
from hpcrun.cluster.avoid import nodes_to_avoid
from hpcrun.cluster.launchers import in_local_cluster, job_id
from hpcrun.cluster.ledger import blame, ledger_path
from hpcrun.config import Job, load_resolved
from hpcrun.diagnose.causes import blames_node, scheduler_word
from hpcrun.lifecycle import exitcodes
from hpcrun.lifecycle.history import Cause, asked_to_end, last_committed, successor
from hpcrun.lifecycle.holder import Occupied, refusal, require_free
from hpcrun.lifecycle.policy import Budgets, without_progress
from hpcrun.lifecycle.scheduler import JobView, end_of, requeue
from hpcrun.lifecycle.settle import (
    SchedulerWord,
    Verdict,
    batch_log,
    settle,
    write_final_word,
)
from hpcrun.run.directory import RunDirectory, RunError
from hpcrun.run.events import Attempt, note, read_events

# Slurm may send its warning signal a minute early (sbatch(1), --signal), and looks every 30 s.
_EARLY = 90.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("run", type=Path, metavar="RUN", help="the run directory")
    parser.add_argument("--exit-code", type=int, required=True, help="what srun returned")
    parser.add_argument(
        "--setup", metavar="COMMAND", help="what failed in the batch script before it started ranks"
    )
    parser.add_argument(
        "--scheduler",
        choices=["preemption", "cancelled", "time-limit", "node-failure"],
        metavar="WHY",
        help="preemption, cancelled, time-limit or node-failure, where it was the scheduler that ended "
        "the attempt (default: Slurm is asked)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Settle the attempt that this environment belongs to."""
    directory = RunDirectory(arguments.run.absolute())
    job = job_id(os.environ)
    if job is None:
        raise RunError("settle: SLURM_JOB_ID is not set; batch scripts call this, not people")
    attempt = Attempt(job, int(os.environ.get("SLURM_RESTART_COUNT") or 0))
    newer = successor(read_events(directory), attempt)
    if newer is not None:
        # An orphan: its node was given up, and its run goes on elsewhere.
        print(f"hpcrun: {newer.owner} has taken over; {attempt.owner} leaves it alone", flush=True)
        return exitcodes.FAILED
    refused = refusal(directory, attempt)
    if refused is not None:
        print(f"hpcrun: {refused}", flush=True)
        return exitcodes.BAD_INPUT
    local = in_local_cluster(os.environ)
    if arguments.setup is not None and not local:
        # No rank has come to ask.
        try:
            require_free(directory, attempt)
        except Occupied as taken:
            print(f"hpcrun: {taken}", flush=True)
            return exitcodes.BAD_INPUT
    word: SchedulerWord | None = arguments.scheduler
    view = None
    if word is None and not local:
        view, told = end_of(attempt, lambda: batch_log(directory, attempt))
        word = cast("SchedulerWord | None", told)
    config = load_resolved(directory.config)
    budgets = Budgets(**config.restarts.model_dump())
    verdict = settle(
        directory,
        attempt,
        arguments.exit_code,
        without_progress(budgets) if config.command else budgets,
        scheduler=word,
        batch_log=batch_log(directory, attempt),
        limit_near=_limit_near(view, float(config.job.signal_lead)),
        # A cancelled job is COMPLETING by now, and one that Slurm has requeued is PENDING. A controller that
        # is away cancels nothing: had it done so before, the step daemon would have said it.
        nobody_asked=not local and (view is None or view.state == "RUNNING"),
        setup=arguments.setup,
    )
    print(f"hpcrun: {verdict.cause.value}: {verdict.line}", flush=True)
    print(f"hpcrun: {verdict.decision.reason}", flush=True)
    if not verdict.decision.restart:
        return _final_code(verdict, arguments.exit_code)
    if local:
        return exitcodes.UNFINISHED

    def failed(kind: str, words: str) -> None:
        note(directory, "requeue-failed", attempt, cause=kind, reason=words)
        what = "not cancelled" if kind == "cancel" else "not requeued yet"
        print(f"hpcrun: {what}: {words}", file=sys.stderr, flush=True)

    def asked() -> str | None:
        if asked_to_end(read_events(directory), attempt):
            return "cancelled"
        return scheduler_word(batch_log(directory, attempt))

    became = requeue(attempt, failed, asked)
    if became == "refused":
        return exitcodes.UNFINISHED
    if became == "cancelled":
        return _cancelled_after_all(directory, attempt, verdict)
    # Only a pending job can be told; a signal no longer ends this process (see the batch script).
    _keep_away(directory, attempt, verdict, config.job)
    return exitcodes.DONE


def _cancelled_after_all(run: RunDirectory, attempt: Attempt, verdict: Verdict) -> int:
    """Take back the start that the verdict has promised: somebody has cancelled the job meanwhile."""
    print("hpcrun: cancelled meanwhile: it is not started again", flush=True)
    events = read_events(run)
    if not asked_to_end(events, attempt):
        note(run, "cancelled", attempt)
    reason = f"cancelled while it was to start again after {verdict.cause.value}"
    write_final_word(run, Cause.CANCELLED, verdict.line, reason, last_committed(events))
    return exitcodes.TERMINATED


def _keep_away(run: RunDirectory, attempt: Attempt, verdict: Verdict, job: Job) -> None:
    """Remember a node that failed, and keep the next attempt away from those that failed too often."""
    crash = verdict.diagnosis if verdict.cause is Cause.CRASH else None
    try:
        if crash is not None and crash.host is not None and blames_node(crash):
            blame(ledger_path(), crash.host, crash.line, str(run.path))
    except OSError as error:
        print(f"hpcrun: the ledger of nodes is not written: {error}", file=sys.stderr, flush=True)
    bad = nodes_to_avoid(job.partition, job.nodes, after=job.exclude_after, hours=job.exclude_hours)
    if not bad:
        return
    given = [job.exclude] if job.exclude else []
    told = slurm.run(slurm.scontrol_exclude_command(attempt.job, given + bad))
    if told.returncode == 0:
        print(f"hpcrun: leaves out {', '.join(bad)}: failed too often", flush=True)
        note(run, "excluded", attempt, hosts=bad)
    else:
        words = " ".join(told.stderr.split())
        print(f"hpcrun: cannot leave out {', '.join(bad)}: {words}", file=sys.stderr, flush=True)


def _limit_near(view: JobView | None, lead: float) -> bool:
    """Whether a warning signal that came now was the one sent ahead of the time limit."""
    # A cancellation cuts the end time to its own moment.
    if view is None or view.end_time is None or view.preempted or view.state != "RUNNING":
        return False
    return view.end_time - time.time() <= lead + _EARLY


def _final_code(verdict: Verdict, code: int) -> int:
    """What a batch script exits with when no other attempt follows: 0 only for a finished training."""
    if verdict.cause is Cause.FINISHED:
        return exitcodes.DONE
    if verdict.cause is Cause.CANCELLED:
        return exitcodes.TERMINATED
    if verdict.cause is Cause.SAVE_FAILED:
        return exitcodes.SAVE_FAILED
    if verdict.cause is Cause.BAD_INPUT:
        return exitcodes.BAD_INPUT
    # 75 would ask for a requeue.
    return code if code not in (exitcodes.DONE, exitcodes.UNFINISHED) else exitcodes.FAILED
