"""Start the ranks of a run in a Slurm job, classify their end, requeue the job.

Batch scripts call this command; people call `hpcrun submit`. The restart policy
of the run decides about the requeue. Exit code 0: the training is done, or the
job has been requeued. 75: the run is to be continued, and the step has not
requeued the job. Any other code: the run ended in a failure (143: stopped on
request).
"""

import argparse
from pathlib import Path

from hpcrun.errors import UserError
from hpcrun.job.srun import Way
from hpcrun.job.step import run_step
from hpcrun.run.directory import RunDirectory
from hpcrun.run.streams import outlive_full_disk


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "runs", type=Path, nargs="+", metavar="RUN", help="run directories; several share the job"
    )
    parser.add_argument(
        "--pack", action="store_true", help="the job is made for several runs, even if one is left"
    )
    parser.add_argument(
        "--packed", action="store_true", help="other runs share the job; do not requeue it"
    )
    parser.add_argument(
        "--own-script",
        action="store_true",
        help="a person wrote the batch script; ignore the `job:` section of the run",
    )
    parser.add_argument(
        "--torchrun",
        action="store_true",
        help="srun starts one torchrun on each node, torchrun starts the ranks",
    )
    parser.add_argument(
        "--failed",
        metavar="COMMAND",
        help="start no rank, because this command of the batch script has failed",
    )
    parser.add_argument(
        "--exit-code", type=int, default=1, metavar="N", help="the exit code of that command"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the batch step of the job that this environment belongs to."""
    outlive_full_disk()
    runs = [RunDirectory(path.absolute()) for path in arguments.runs]
    if len(runs) > 1 and not arguments.pack:
        raise UserError(f"batch: {runs[1].path}: runs share a job only with --pack; name one run")
    if arguments.pack:
        from hpcrun.job.pack import run_pack

        return run_pack(runs)
    way = Way(arguments.own_script, arguments.torchrun, arguments.packed)
    return run_step(runs[0], way, arguments.failed, arguments.exit_code)
