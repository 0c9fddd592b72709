"""Save, then stop: send SIGTERM to every rank; the run checkpoints and ends.

`hpcrun resume` continues a run. Given a sweep, the command cancels every run
that has a job; the command that submitted the sweep continues its runs. Of
several names, all jobs get their signal before the command waits.
"""

import argparse
from pathlib import Path

from hpcrun.api.cancelling import note_end, time_to_end
from hpcrun.api.sweeps.cancelling import cancel_sweep, wait_for_ends
from hpcrun.api.sweeps.unrecorded import record_killed_submission
from hpcrun.cli.run_arguments import add_runs_dir, runs_dir
from hpcrun.cli.run_summary import print_end
from hpcrun.errors import UserError
from hpcrun.launch import jobs, stopping
from hpcrun.printing import say, say_aside
from hpcrun.run.directory import RunDirectory, find
from hpcrun.run.sweep_file import is_element, is_sweep


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="names or directories of runs or sweeps"
    )
    add_runs_dir(parser)
    parser.add_argument("--now", action="store_true", help="kill the run, without a checkpoint")
    parser.add_argument("--no-wait", action="store_true", help="return without waiting for the end")


def run(arguments: argparse.Namespace) -> int:
    """Cancel the jobs of the runs and sweeps, and wait for the ends."""
    # An unknown name cancels nothing.
    folders = [_folder(name, arguments) for name in arguments.runs]
    code, single, swept = 0, list[RunDirectory](), list[RunDirectory]()
    for folder in dict.fromkeys(folders):
        if is_sweep(folder):
            code = max(code, _cancel_sweep(folder, arguments.now, swept))
            continue
        try:
            directory = RunDirectory(folder)
            if is_element(directory):
                record_killed_submission(folder.parent)
            done = stopping.kill(directory) if arguments.now else stopping.cancel(directory)
        except UserError as error:
            if len(folders) == 1:
                raise
            say_aside(f"hpcrun: {error}")
            code = 2
            continue
        say(f"hpcrun: {directory.name}: {done}" if len(folders) > 1 else f"hpcrun: {done}")
        single.append(directory)
    if arguments.no_wait:
        return code
    for directory in single:
        limit = time_to_end(directory)
        if jobs.wait_until_ended(directory, limit):
            note_end(directory)
            print_end(directory)
            continue
        say(f"hpcrun: the job has not ended after {limit:.0f} s; `hpcrun status` shows its state")
        code = max(code, 1)
    for directory in wait_for_ends(swept):
        say(f"hpcrun: {directory.name}: the job has not ended; `hpcrun status` shows its state")
        code = max(code, 1)
    return code


def _folder(name: str, arguments: argparse.Namespace) -> Path:
    """Return the folder of the sweep or run ``name``; raises RunError if there is none."""
    for folder in (runs_dir(arguments) / name, Path(name)):
        if is_sweep(folder):
            return folder.absolute()
    return find(name, runs_dir(arguments)).path


def _cancel_sweep(folder: Path, now: bool, signaled: list[RunDirectory]) -> int:
    """Cancel every run of the sweep that has a job, and append these runs to ``signaled``."""
    found = []
    for one in cancel_sweep(folder, now=now):
        found.append(one)
        (say if one.done else say_aside)(
            f"hpcrun: {one.run.name}: {one.words}" if one.done else f"hpcrun: {one.words}"
        )
    if not found:
        say(f"hpcrun: {folder.name}: no run of the sweep has a job")
    signaled += [one.run for one in found if one.done]
    return 0 if all(one.done for one in found) else 1
