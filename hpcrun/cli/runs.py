"""The arguments that name runs, shared by the commands."""

import argparse
import os
from pathlib import Path

from hpcrun.run.directory import RunDirectory, RunError, find


def add_runs_dir(parser: argparse.ArgumentParser) -> None:
    """Add ``--runs-dir``: where run directories lie."""
    parser.add_argument(
        "--runs-dir",
        type=Path,
        default=Path(os.environ.get("HPCRUN_RUNS", "runs")),
        metavar="DIR",
        help="where run directories lie (default: $HPCRUN_RUNS, else ./runs)",
    )


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add the argument RUN and ``--runs-dir``."""
    parser.add_argument("run", metavar="RUN", help="a run's name, or its directory")
    add_runs_dir(parser)


def find_run(arguments: argparse.Namespace) -> RunDirectory:
    """The run that RUN names; raises RunError when there is none."""
    return find(arguments.run, arguments.runs_dir.absolute())


def all_runs(runs_dir: Path) -> list[RunDirectory]:
    """Every run under ``runs_dir``, newest first."""
    found = [RunDirectory(path.parent.absolute()) for path in runs_dir.glob("*/run.json")]
    if not runs_dir.is_dir():
        raise RunError(f"{runs_dir}: no such directory; name one with --runs-dir")
    return sorted(found, key=lambda run: run.record.stat().st_mtime, reverse=True)
