"""Continue a run from its newest checkpoint, as it was submitted.

The code is that of the folder it was submitted from, as it is now. It goes
to Slurm where there is one, else it runs on this machine.
"""

import argparse

from hpcrun.cli.continuing import from_scratch, unchanged
from hpcrun.cli.runs import add_run, find_run
from hpcrun.cli.submit import add_continuing, require_one_way, say_finished, start
from hpcrun.config import load_resolved
from hpcrun.launch import submission
from hpcrun.run.files import read_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    add_run(parser)
    add_continuing(parser)
    # None: as it was submitted.
    parser.add_argument(
        "--no-snapshot",
        action="store_true",
        default=None,
        help="run the code as it lies, not a copy of it",
    )
    parser.add_argument("--follow", action="store_true", help="watch it (default for local runs)")
    parser.add_argument("--detach", action="store_true", help="return once it is submitted")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object; implies --detach"
    )


def run(arguments: argparse.Namespace) -> int:
    """Submit the run again; the exit code is the run's when it was followed."""
    require_one_way(arguments)
    directory = find_run(arguments)
    result = read_json(directory.result) or {}
    scratch = arguments.from_scratch
    if result.get("state") == "finished" and not scratch:
        return say_finished(directory, result, arguments.json)
    config = load_resolved(directory.config)
    executor = submission.choose_executor(config)
    admit = from_scratch if scratch else unchanged
    return start(directory, config, executor, arguments, lambda: admit(directory, config))
