"""Finalize an attempt that has ended: find the cause, record it, and decide
about a restart.

The local cluster calls this command after the ranks have ended; in a Slurm job
the batch step does the same. Exit code 75: the run must be started again. 76:
the run must be started again without the delay of a requeue. 0: the training is
done. Any other code: the run ended in a failure (143: stopped
on request).
"""

import argparse
import os
from pathlib import Path

from hpcrun import exit_codes
from hpcrun.job.ending import RunTakenOver, final_code, finalize_attempt
from hpcrun.job.scheduler_view import Ending, batch_log
from hpcrun.ports.strategies import AttemptEnd, next_start
from hpcrun.printing import say
from hpcrun.run.attempt import attempt_here
from hpcrun.run.directory import RunDirectory, RunError
from hpcrun.run.journal.journal import Journal
from hpcrun.run.streams import outlive_full_disk
from hpcrun.slurm.own_config import load_own
from hpcrun.slurm.placement import in_local_cluster, job_id


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
    # Before anything else is read or written there.
    config = load_own(directory)
    attempt = attempt_here(job, os.environ)
    ending = Ending(
        arguments.scheduler, batch_log(directory, attempt), limit_near=arguments.limit_near
    )
    try:
        ended = finalize_attempt(directory, attempt, arguments.exit_code, ending, config=config)
    except RunTakenOver as other:
        say(f"hpcrun: {other}")
        return other.code
    if not ended.classification.decision.restart:
        return final_code(ended.classification, arguments.exit_code)
    found = ended.classification
    state = found.state or Journal(directory).read()
    end = AttemptEnd(directory.path, state, attempt, found.cause, found.line, ended.config)

    def cancelled() -> bool:
        try:
            return Journal(directory).read().asked_to_end(attempt)
        except OSError:
            # The local cluster has the order too, and looks at it before the next start.
            return False

    start = next_start(end, lambda words: say(f"hpcrun: {words}"), cancelled)
    in_place = start is not None and start.how == "step"
    return exit_codes.AGAIN_IN_PLACE if in_place else exit_codes.UNFINISHED
