"""The arguments that name runs, shared by the commands."""

import argparse
from pathlib import Path

from hpcrun.api.places import runs_folder
from hpcrun.run.directory import RunDirectory, RunError, find


def add_runs_dir(parser: argparse._ActionsContainer) -> None:
    """Add ``--runs-dir``, the folder of the run directories."""
    parser.add_argument(
        "--runs-dir",
        type=Path,
        metavar="DIR",
        help="folder of the run directories (default: $HPCRUN_RUNS, else ./runs)",
    )


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add the argument RUN and ``--runs-dir``."""
    parser.add_argument("run", metavar="RUN", help="a run's name, or its directory")
    add_runs_dir(parser)


def runs_dir(arguments: argparse.Namespace) -> Path:
    """Return the folder that contains the runs: ``--runs-dir``, else the default."""
    return runs_folder(arguments.runs_dir)


def find_run(arguments: argparse.Namespace) -> RunDirectory:
    """Return the run that RUN names; raises RunError if there is none."""
    return find(arguments.run, runs_dir(arguments))


def find_run_instead(target: str, folder: Path, missing: str) -> RunDirectory:
    """Return the run ``target`` of a command that also takes files.

    Raises:
        RunError: there is no such run; ``missing`` describes the other possibility, such as "no such file".
    """
    try:
        return find(target, folder)
    except RunError as error:
        start, told = f"{target}: no such run", str(error)
        if not told.startswith(start):
            raise
        rest = told.removeprefix(start)
        raise RunError(f"{target}: {missing}, and no such run{rest}") from error
