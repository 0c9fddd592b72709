"""Continue a run from its newest checkpoint, as it was configured, on the same executor if it is there."""

import argparse

from hpcrun.cli.outcome import print_result
from hpcrun.cli.runs import add_run, find_run
from hpcrun.cli.submit import start
from hpcrun.config import load_resolved
from hpcrun.errors import UserError
from hpcrun.launch import submission
from hpcrun.run.files import read_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    add_run(parser)
    parser.add_argument("--follow", action="store_true", help="watch it (default for local runs)")
    parser.add_argument("--detach", action="store_true", help="return once it is submitted")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object; implies --detach"
    )


def run(arguments: argparse.Namespace) -> int:
    """Submit the run again; the exit code is the run's when it was followed."""
    if arguments.follow and (arguments.detach or arguments.json):
        raise UserError("--follow and --detach (or --json) exclude each other; choose one")
    directory = find_run(arguments)
    if (read_json(directory.result) or {}).get("state") == "finished":
        print(f"hpcrun: {directory.name} is finished; there is nothing to continue")
        print_result(directory)
        return 0
    config = load_resolved(directory.config)
    return start(directory, config, submission.choose_executor(config), arguments)
