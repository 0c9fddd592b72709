"""Save, then stop: send SIGTERM to every rank; the run checkpoints and ends.

`hpcrun resume` continues a run. Given a sweep, the command cancels every run
that has a job; the command that submitted the sweep continues its runs.
"""

import argparse
from pathlib import Path

from hpcrun.api.cancellation import Cancelled, cancel_all, wait_for_ends
from hpcrun.cli.arguments import add_runs_dir, find_named, runs_dir
from hpcrun.cli.output import print_end
from hpcrun.errors import UserError
from hpcrun.printing import say, say_aside
from hpcrun.run.directory import RunDirectory
from hpcrun.run.sweep_file import is_sweep
from hpcrun.slurm.launch import stopping


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
    outcomes: list[Cancelled] = []
    for folder in dict.fromkeys(folders):
        if is_sweep(folder):
            found = [*cancel_all(folder, now=arguments.now)]
        else:
            found = [_cancel_run(RunDirectory(folder), arguments.now, only=len(folders) == 1)]
        for one in found:
            name = f"{one.run.name}: " if one.done else ""
            (say if one.done else say_aside)(f"hpcrun: {name}{one.words}")
        if not found:
            say(f"hpcrun: {folder.name}: no run of the sweep has a job")
        outcomes += found
    signaled = [one.run for one in outcomes if one.done and not arguments.no_wait]
    live = wait_for_ends(signaled)
    for run in signaled:
        if run in live:
            say(f"hpcrun: {run.name}: the job has not ended; `hpcrun status` shows its state")
        elif run.path in folders:
            print_end(run)
    return 0 if not live and all(one.done for one in outcomes) else 1


def _folder(name: str, arguments: argparse.Namespace) -> Path:
    """Return the folder of the sweep or run ``name``; raises RunError if there is none."""
    for folder in (runs_dir(arguments) / name, Path(name)):
        if is_sweep(folder):
            return folder.absolute()
    return find_named(name, runs_dir(arguments)).path


def _cancel_run(run: RunDirectory, now: bool, only: bool) -> Cancelled:
    """Cancel the job of ``run``; raise UserError only if it is the ``only`` run."""
    try:
        return Cancelled(run, True, (stopping.kill if now else stopping.cancel)(run))
    except UserError as error:
        if only:
            raise
        return Cancelled(run, False, str(error))
