"""Save, then stop: SIGTERM to every rank, which checkpoints and ends.

`hpcrun resume` continues the run.
"""

import argparse

from hpcrun.cli.outcome import print_end
from hpcrun.cli.runs import add_run, find_run
from hpcrun.config import load_resolved
from hpcrun.launch import jobs
from hpcrun.lifecycle.history import Cause, last_committed
from hpcrun.lifecycle.settle import write_final_word
from hpcrun.printing import say
from hpcrun.run.events import read_events
from hpcrun.run.files import read_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    add_run(parser)
    parser.add_argument("--now", action="store_true", help="kill it, without a checkpoint")
    parser.add_argument("--no-wait", action="store_true", help="do not wait until it has ended")


def run(arguments: argparse.Namespace) -> int:
    """Cancel the run's job, and wait for its end."""
    directory = find_run(arguments)
    done = jobs.kill(directory) if arguments.now else jobs.cancel(directory)
    say(f"hpcrun: {done}")
    if arguments.no_wait:
        return 0
    job = load_resolved(directory.config).job
    limit = max(job.grace, float(job.kill_wait)) + 60.0
    if not jobs.wait_until_ended(directory, limit):
        say(f"hpcrun: still there after {limit:.0f} s; look with `hpcrun status`")
        return 1
    if read_json(directory.result) is None:
        # It waited for its start, or its batch script was killed: nobody else is left to say it.
        step = last_committed(read_events(directory))
        write_final_word(directory, Cause.CANCELLED, "", "it was cancelled", step)
    print_end(directory)
    return 0
