"""The folder that contains the runs, and the shortest name of a run in it."""

import os
import shlex
from pathlib import Path

from hpcrun.run.directory import RunDirectory


def runs_folder(given: str | os.PathLike[str] | None = None) -> Path:
    """Return the absolute path of ``given``, else of ``$HPCRUN_RUNS``, else of ``./runs``.

    A shell leaves the tilde of ``--runs-dir=~/runs`` and of quoted words as it is.
    """
    return home_path(given or os.environ.get("HPCRUN_RUNS") or "runs").absolute()


def home_path(path: str | os.PathLike[str]) -> Path:
    """Return ``path`` with the home folder in place of a tilde; unchanged if the user is unknown."""
    return Path(os.path.expanduser(path))  # noqa: PTH111 (pathlib raises without such a user)


def handle(run: RunDirectory) -> str:
    """Return the argument that names ``run`` in a command here: its name if that is enough, else its path.

    The name of an element of a sweep is ``SWEEP/003``.
    """
    from hpcrun.run.sweep_file import is_element

    folder = runs_folder()
    if run.path.parent == folder:
        return shlex.quote(run.name)
    if run.path.parent.parent == folder and is_element(run):
        return shlex.quote(run.name)
    return shlex.quote(str(run.path))
