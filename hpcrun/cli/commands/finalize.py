"""Finalize an attempt that has ended: find the cause, record it, and decide
about a restart.

The local cluster calls this command after the ranks have ended; in a Slurm job
the batch step does the same. Exit code 75: the run must be started again. 0:
the training is done. Any other code: the run ended in a failure (143: stopped
on request).
"""

import argparse
import os
from pathlib import Path

from hpcrun.job import policy as exitcodes
from hpcrun.job.ending import RunTakenOver, final_code, finalize_attempt
from hpcrun.job.scheduler_view import Ending, batch_log
from hpcrun.printing import say
from hpcrun.ranks.launchers import in_local_cluster, job_id
from hpcrun.run.directory import RunDirectory, RunError
from hpcrun.run.events import Attempt
from hpcrun.run.streams import outlive_full_disk


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("run", type=Path, metavar="RUN", help="the run directory")
    parser.add_argument(
        "--exit-code", type=int, required=True, help="the highest exit code of a rank"
    )
    parser.add_argument(
        "--scheduler",
        choices=["preemption", "cancelled", "time-limit", "node-failure"],
        metavar="WHY",
        help="preemption, cancelled, time-limit or node-failure, if the scheduler ended "
        "the attempt",
    )
    parser.add_argument(
        "--limit-near",
        action="store_true",
        help="the ranks had received the signal that announces the time limit",
    )


def run(arguments: argparse.Namespace) -> int:
    """Finalize the attempt that this environment belongs to."""
    job = job_id(os.environ)
    if job is None or not in_local_cluster(os.environ):
        raise RunError("finalize: only a job of the local cluster may call this command")
    outlive_full_disk()
    directory = RunDirectory(arguments.run.absolute())
    attempt = Attempt(job, int(os.environ.get("SLURM_RESTART_COUNT") or 0))
    ending = Ending(
        arguments.scheduler, batch_log(directory, attempt), limit_near=arguments.limit_near
    )
    try:
        classification = finalize_attempt(
            directory,
            attempt,
            arguments.exit_code,
            ending,
        ).classification
    except RunTakenOver as other:
        say(f"hpcrun: {other}")
        return other.code
    if classification.decision.restart:
        return exitcodes.UNFINISHED
    return final_code(classification, arguments.exit_code)
