"""The argument that names checkpoints: a run, or the folder of a ``Checkpointer``."""

import argparse
from pathlib import Path

from hpcrun.checkpoint.storage.store import CheckpointStore
from hpcrun.cli.run_arguments import add_runs_dir, find_run, runs_dir
from hpcrun.run.directory import RunDirectory


def add_saved(parser: argparse.ArgumentParser) -> None:
    """Add the argument RUN, which may be a folder of checkpoints, and ``--runs-dir``."""
    parser.add_argument(
        "run", metavar="RUN", help="a run's name, its directory, or a Checkpointer's folder"
    )
    add_runs_dir(parser)


def find_saved(arguments: argparse.Namespace, owner: str) -> tuple[CheckpointStore, str]:
    """Return the checkpoints that RUN names, and the name of their run or folder.

    Args:
        owner: the owner string for the store.

    Raises:
        RunError: there is neither a run nor a checkpoint.
        CheckpointError: other users may write there.
    """
    folder = Path(arguments.run).absolute()
    is_run = any(
        RunDirectory(path).exists() for path in (runs_dir(arguments) / arguments.run, folder)
    )
    if not is_run and folder.is_dir():
        store = CheckpointStore(folder, owner)
        if store.steps():
            store.require_private()
            return store, arguments.run
    run = find_run(arguments)
    store = CheckpointStore(run.checkpoints, owner)
    store.require_private()
    return store, run.name
