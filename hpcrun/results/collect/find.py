"""Search for the run directories below the named folders."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from hpcrun.errors import ResultsError

_MARKS = ("run.json", "config.yaml", "events.jsonl", "metrics.jsonl")
# A sweep may have subfolders; a folder of data may have a million of them.
_DEEPEST = 3


def find_runs(named: Iterable[str], runs_dir: Path) -> list[str]:
    """Return the real paths of all runs, each once, in the order of their names.

    Args:
        named: run directories, folders of them, or names below ``runs_dir``.

    Raises:
        ResultsError: a name is not a directory, or contains no run.
    """
    found: dict[str, None] = {}
    for name in named:
        folder = _folder(name, runs_dir)
        # A link to a run is not a second run.
        here = _below(os.path.realpath(folder), 0)
        if not here:
            raise ResultsError(
                f"{folder}: contains no run directories; name one, or a folder of them"
            )
        found |= dict.fromkeys(here)
    return sorted(found)


def _folder(name: str, runs_dir: Path) -> Path:
    for path in (Path(name), runs_dir / name):
        if name and path.is_dir():
            return path
    raise ResultsError(
        f"{name}: no such directory, neither here nor in {runs_dir}; name a run directory or a folder "
        "of them"
    )


def _below(folder: str, depth: int) -> list[str]:
    """Return the real paths of the runs in ``folder``, a real path."""
    if _is_run(folder):
        return [folder]
    if depth == _DEEPEST:
        return []
    try:
        with os.scandir(folder) as entries:
            # Path.resolve() asks for each part of the path; among ten thousand runs only links need it.
            inner = sorted(
                os.path.realpath(entry.path) if entry.is_symlink() else entry.path
                for entry in entries
                if not entry.name.startswith(".") and entry.is_dir()
            )
    except OSError as error:
        if depth:
            return []
        raise ResultsError(
            f"{folder}: cannot be read: {error.strerror}; ask its owner for access"
        ) from None
    return [run for path in inner for run in _below(path, depth + 1)]


def _is_run(folder: str) -> bool:
    # If a run lost a file, the other files are still read.
    there = [os.path.isfile(f"{folder}/{mark}") for mark in _MARKS[:2]]  # noqa: PTH113
    if all(there):
        return True
    return any(there) and any(os.path.isfile(f"{folder}/{mark}") for mark in _MARKS[2:])  # noqa: PTH113
