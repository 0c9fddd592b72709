"""Continue a run from its newest checkpoint, as it was submitted.

The code comes from the folder from which the run was submitted, in its present
state. The job goes to Slurm if there is a Slurm, else it runs on this machine.
"""

import argparse

from hpcrun.api.submission.plan import plan_resume
from hpcrun.cli.arguments import add_run, find_run, request_of
from hpcrun.cli.commands.submit import add_following, add_snapshot, require_one_way, start


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add_run(parser)
    # None: as it was submitted.
    add_snapshot(parser, default=None)
    add_following(parser)


def run(arguments: argparse.Namespace) -> int:
    """Submit the run again; if it is followed, return the run's exit code."""
    require_one_way(arguments)
    return start(plan_resume(find_run(arguments), request_of(arguments)), arguments)
