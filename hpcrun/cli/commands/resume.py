"""Continue a run from its newest checkpoint, as it was submitted.

The code comes from the folder from which the run was submitted, in its present
state. The job goes to Slurm if there is a Slurm, else it runs on this machine.
"""

import argparse

from hpcrun.api.submission.plan import finished_result, plan_resume
from hpcrun.cli.arguments import add_run, find_run
from hpcrun.cli.commands.submit import add_continuing, require_one_way, say_finished, start


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add_run(parser)
    add_continuing(parser)
    # None: as it was submitted.
    parser.add_argument(
        "--no-snapshot",
        action="store_true",
        default=None,
        help="run the code in the working tree, not a copy of it",
    )
    parser.add_argument(
        "--follow", action="store_true", help="watch the run (default for local runs)"
    )
    parser.add_argument("--detach", action="store_true", help="return after the submission")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object; implies --detach"
    )


def run(arguments: argparse.Namespace) -> int:
    """Submit the run again; if it is followed, return the run's exit code."""
    require_one_way(arguments)
    run_directory = find_run(arguments)
    scratch = arguments.from_scratch
    result = None if scratch else finished_result(run_directory)
    if result is not None:
        return say_finished(run_directory, result, arguments.json)
    snapshot = None if arguments.no_snapshot is None else not arguments.no_snapshot
    return start(plan_resume(run_directory, scratch=scratch, snapshot=snapshot), arguments)
