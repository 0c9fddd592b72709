"""Save, then stop: send SIGTERM to every rank; the run checkpoints and ends.

`hpcrun resume` continues the run. Given a sweep, the command cancels every run
that has a job; the command that submitted the sweep continues its runs.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from hpcrun.api.cancelling import note_end, time_to_end
from hpcrun.api.sweeps.unrecorded import record_killed_submission
from hpcrun.cli.run_arguments import add_run, find_run, runs_dir
from hpcrun.cli.run_summary import print_end
from hpcrun.errors import UserError
from hpcrun.launch import jobs
from hpcrun.printing import say, say_aside
from hpcrun.run.directory import RunDirectory
from hpcrun.run.sweep_file import is_element, is_sweep, read_sweep


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


def _cancel_sweep(folder: Path, arguments: argparse.Namespace) -> int:
    """Cancel every run of the sweep that has a job, and wait for the end of all of them."""
    record_killed_submission(folder)
    sweep = read_sweep(folder)
    runs = [run for run in (sweep.directories.values() if sweep else ()) if run.exists()]
    cancelled, refused = [], 0
    found = [pair for pair in zip(runs, jobs.states(runs), strict=True) if pair[1].live]
    # Waiting runs first: Slurm would start a waiting run in the place of a cancelled run.
    for run, _ in sorted(found, key=lambda pair: pair[1].word == "running"):
        try:
            say(f"hpcrun: {run.name}: {(jobs.kill if arguments.now else jobs.cancel)(run)}")
            cancelled.append(run)
        except (UserError, OSError) as error:
            # A run may end between the two calls. The other runs must be cancelled all the same.
            say_aside(f"hpcrun: {error}")
            refused += 1
    if not cancelled and not refused:
        say(f"hpcrun: {folder.name}: no run of the sweep has a job")
    return 1 if refused or (not arguments.no_wait and not _all_ended(cancelled)) else 0


def _all_ended(runs: Sequence[RunDirectory]) -> bool:
    """Wait for the end of all jobs together, and record each end; return False if a job goes on."""
    start, ended = time.monotonic(), True
    for run in runs:
        limit = start + time_to_end(run) - time.monotonic()
        if jobs.wait_until_ended(run, max(limit, 1.0)):
            note_end(run)
        else:
            say(f"hpcrun: {run.name}: the job has not ended; `hpcrun status` shows its state")
            ended = False
    return ended
