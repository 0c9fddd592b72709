"""Save, then stop: send SIGTERM to every rank; the run checkpoints and ends.

`hpcrun resume` continues the run.
"""

import argparse

from hpcrun.api.cancelling import note_end, time_to_end
from hpcrun.cli.run_arguments import add_run, find_run
from hpcrun.cli.run_summary import print_end
from hpcrun.launch import jobs
from hpcrun.printing import say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add_run(parser)
    parser.add_argument("--now", action="store_true", help="kill the run, without a checkpoint")
    parser.add_argument("--no-wait", action="store_true", help="return without waiting for the end")


def run(arguments: argparse.Namespace) -> int:
    """Cancel the run's job, and wait for its end."""
    directory = find_run(arguments)
    done = jobs.kill(directory) if arguments.now else jobs.cancel(directory)
    say(f"hpcrun: {done}")
    if arguments.no_wait:
        return 0
    limit = time_to_end(directory)
    if not jobs.wait_until_ended(directory, limit):
        say(f"hpcrun: the job has not ended after {limit:.0f} s; `hpcrun status` shows its state")
        return 1
    note_end(directory)
    print_end(directory)
    return 0
