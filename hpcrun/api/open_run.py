"""The object for a run that exists: of a training, or of a Python function."""

import os

from hpcrun.api.add_ons import add_on
from hpcrun.api.places import runs_folder
from hpcrun.api.run import Run, refusing
from hpcrun.run.directory import CALLS, RunDirectory, find


def run_at(directory: RunDirectory) -> Run:
    """Return the run in ``directory``, as a `FunctionRun` if a Python function runs there."""
    if any((folder / CALLS).is_dir() for folder in (directory.path, directory.path.parent)):
        run: Run = add_on("run of a function")(directory)
        return run
    return Run(directory)


@refusing
def open_run(run: str | os.PathLike[str], *, runs_dir: str | os.PathLike[str] | None = None) -> Run:
    """Return the run that ``run`` names.

    Args:
        run: the name of a run, or the path of a run directory.
        runs_dir: the folder of the runs; None: ``$HPCRUN_RUNS``, else ``./runs``.

    Raises:
        UserError: there is no such run, or other users may write to it.
    """
    return run_at(find(os.fspath(run), runs_folder(runs_dir)))
