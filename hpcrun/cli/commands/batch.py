"""Start the ranks of a run in a Slurm job, classify their end, requeue the job.

Batch scripts call this command; people call `hpcrun submit`. The restart policy
of the run decides about the requeue. Exit code 0: the training is done, or the
job has been requeued. 75: the run is to be continued, and the step has not
requeued the job. Any other code: the run ended in a failure (143: stopped on
request).
"""

import argparse
from pathlib import Path

from hpcrun.job.step import run_step
from hpcrun.run.directory import RunDirectory
from hpcrun.run.streams import outlive_full_disk


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("run", type=Path, metavar="RUN", help="the run directory")
    parser.add_argument(
        "--own-script",
        action="store_true",
        help="a person wrote the batch script; ignore the `job:` section of the run",
    )
    parser.add_argument(
        "--failed",
        metavar="COMMAND",
        help="start no rank, because this command of the batch script has failed",
    )
    parser.add_argument(
        "--exit-code", type=int, default=1, metavar="N", help="the exit code of that command"
    )
    parser.add_argument(
        "--submitted",
        metavar="HASH",
        help="the hash of the submitted config; another config starts no rank where other users can "
        "replace the run directory",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the batch step of the job that this environment belongs to."""
    outlive_full_disk()
    run = RunDirectory(arguments.run.absolute())
    return run_step(
        run,
        own_script=arguments.own_script,
        failed=arguments.failed,
        code=arguments.exit_code,
        submitted=arguments.submitted,
    )
