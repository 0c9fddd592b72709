"""Save, then stop: send SIGTERM to every rank; the run checkpoints and ends.

`hpcrun resume` continues the run. Given a sweep, the command cancels every run
that has a job; the command that submitted the sweep continues its runs.
"""

import argparse
from pathlib import Path

from hpcrun.api.cancelling import note_end, time_to_end
from hpcrun.api.sweeps.cancelling import cancel_sweep, wait_for_ends
from hpcrun.api.sweeps.unrecorded import record_killed_submission
from hpcrun.cli.run_arguments import add_run, find_run, runs_dir
from hpcrun.cli.run_summary import print_end
from hpcrun.launch import jobs, stopping
from hpcrun.printing import say, say_aside
from hpcrun.run.sweep_file import is_element, is_sweep


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add_run(parser)
    parser.add_argument("--now", action="store_true", help="kill the run, without a checkpoint")
    parser.add_argument("--no-wait", action="store_true", help="return without waiting for the end")


def run(arguments: argparse.Namespace) -> int:
    """Cancel the job of the run, or the jobs of the sweep, and wait for the end."""
    for folder in (runs_dir(arguments) / arguments.run, Path(arguments.run)):
        if is_sweep(folder):
            return _cancel_sweep(folder.absolute(), arguments)
    directory = find_run(arguments)
    if is_element(directory):
        record_killed_submission(directory.path.parent)
    done = stopping.kill(directory) if arguments.now else stopping.cancel(directory)
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


def _cancel_sweep(folder: Path, arguments: argparse.Namespace) -> int:
    """Cancel every run of the sweep that has a job, and wait for the end of all of them."""
    found = []
    for one in cancel_sweep(folder, now=arguments.now):
        found.append(one)
        (say if one.done else say_aside)(
            f"hpcrun: {one.run.name}: {one.words}" if one.done else f"hpcrun: {one.words}"
        )
    if not found:
        say(f"hpcrun: {folder.name}: no run of the sweep has a job")
    live = []
    if not arguments.no_wait:
        live = wait_for_ends([one.run for one in found if one.done])
        for run in live:
            say(f"hpcrun: {run.name}: the job has not ended; `hpcrun status` shows its state")
    return 0 if not live and all(one.done for one in found) else 1
