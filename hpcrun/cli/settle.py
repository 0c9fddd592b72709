"""Judge an attempt that has ended: find the cause, write it down, requeue where the policy says so.

Batch scripts and the local cluster call it after the ranks have gone. Exit code 75: the job is to be
requeued, and whoever called must do it; 0: there is nothing more to do.
"""

import argparse
import os
import sys
import time
from pathlib import Path

from hpcrun.cluster import slurm
from hpcrun.cluster.launchers import in_local_cluster, job_id
from hpcrun.config import load_resolved
from hpcrun.lifecycle import exitcodes
from hpcrun.lifecycle.policy import Budgets
from hpcrun.lifecycle.settle import SchedulerWord, Verdict, read_batch_log, settle
from hpcrun.run.directory import RunDirectory, RunError
from hpcrun.run.events import Attempt, note

_TRIES, _PAUSE = 5, 6.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("run", type=Path, metavar="RUN", help="the run directory")
    parser.add_argument("--exit-code", type=int, required=True, help="what srun returned")
    parser.add_argument(
        "--scheduler",
        choices=["preemption", "cancelled", "time-limit", "node-failure"],
        help="why the scheduler ended it, if it did (default: Slurm is asked)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Settle the attempt that this environment belongs to."""
    directory = RunDirectory(arguments.run.absolute())
    job = job_id(os.environ)
    if job is None:
        raise RunError("settle: SLURM_JOB_ID is not set; batch scripts call this, not people")
    attempt = Attempt(job, int(os.environ.get("SLURM_RESTART_COUNT") or 0))
    local = in_local_cluster(os.environ)
    word: SchedulerWord | None = arguments.scheduler
    if word is None and not local:
        word = ask_slurm(job)
    config = load_resolved(directory.config)
    verdict = settle(
        directory,
        attempt,
        arguments.exit_code,
        Budgets(**config.restarts.model_dump()),
        scheduler=word,
        batch_log=read_batch_log(
            directory.logs / f"batch-{job}.log", f"hpcrun: attempt {attempt.owner} "
        ),
    )
    print(f"hpcrun: {verdict.cause.value}: {verdict.line}", flush=True)
    print(f"hpcrun: {verdict.decision.reason}", flush=True)
    if not verdict.decision.restart:
        return exitcodes.DONE
    if local:
        return exitcodes.UNFINISHED
    return _requeue(directory, attempt, verdict)


def ask_slurm(job: str) -> SchedulerWord | None:
    """Slurm's own word for why ``job`` is ending, while it still is; None when it is not its doing."""
    shown = slurm.run(slurm.scontrol_show_job_command(job))
    if shown.returncode != 0:
        return None
    facts = slurm.parse_show_job(shown.stdout)
    state = facts.get("JobState", "")
    if facts.get("PreemptTime", "None") not in ("None", "", "Unknown") or state == "PREEMPTED":
        return "preemption"
    if state in ("CANCELLED", "TIMEOUT", "NODE_FAIL"):
        words: dict[str, SchedulerWord] = {
            "CANCELLED": "cancelled",
            "TIMEOUT": "time-limit",
            "NODE_FAIL": "node-failure",
        }
        return words[state]
    return None


def _requeue(run_directory: RunDirectory, attempt: Attempt, verdict: Verdict) -> int:
    """Ask Slurm to start the job again; leave it to the batch script where that fails."""
    if verdict.restart_by_scheduler:
        print("hpcrun: Slurm requeues a preempted job itself", flush=True)
        return exitcodes.DONE
    for attempt_number in range(_TRIES):
        asked = slurm.run(slurm.scontrol_requeue_command(attempt.job))
        if asked.returncode == 0:
            return exitcodes.DONE
        kind = slurm.classify_requeue_error(asked.stderr)
        if kind == "pending":
            return exitcodes.DONE
        words = " ".join(asked.stderr.split())
        note(run_directory, "requeue-failed", attempt, cause=kind, reason=words)
        print(f"hpcrun: scontrol requeue: {words}", file=sys.stderr, flush=True)
        if kind not in ("transient", "unknown"):
            break
        if attempt_number + 1 < _TRIES:
            time.sleep(_PAUSE)
    return exitcodes.UNFINISHED
