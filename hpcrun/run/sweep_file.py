"""The file ``sweep.json`` of a sweep folder: the runs with their values.

The folder ``runs/SWEEP`` holds this file and a run directory for each element: ``runs/SWEEP/000`` and so on.
An element keeps its name for good: a later submission adds elements and renames none.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcrun.run.directory import RunDirectory, RunError
from hpcrun.run.files import read_json, write_hashed

NAME = "sweep.json"
VERSION = 4


@dataclass(frozen=True)
class SweepRun:
    """One element: the ``name`` of its folder (``003``), and its value for each dotted key."""

    name: str
    values: Mapping[str, Any]


@dataclass(frozen=True)
class SweepFile:
    """The content of ``sweep.json`` in ``folder``."""

    folder: Path
    runs: Sequence[SweepRun]

    @property
    def directories(self) -> dict[str, RunDirectory]:
        """The run directory of each element, by the element's name; one may not exist yet."""
        return {run.name: RunDirectory(self.folder / run.name) for run in self.runs}


def is_sweep(folder: Path) -> bool:
    """Return True if ``folder`` is the folder of a sweep."""
    # os.path, since Path.is_file() raises for a folder without permission.
    return os.path.isfile(folder / NAME)  # noqa: PTH113


def is_element(run: RunDirectory) -> bool:
    """Return True if ``run`` is in the folder of a sweep."""
    return is_sweep(run.path.parent)


def read_sweep(folder: Path) -> SweepFile | None:
    """Return the sweep of ``folder``, or None without a ``sweep.json``.

    Raises:
        RunError: the file is damaged, or of a newer version.
        OSError: the file exists but cannot be read.
    """
    path = folder / NAME
    if not path.exists():
        return None
    content = read_json(path)
    damaged = RunError(f"{path}: is damaged or was edited; restore it from a backup")
    if content is None:
        raise damaged
    if content.get("version") != VERSION:
        raise RunError(
            f"{path}: has version {content.get('version')!r}, and this hpcrun reads version {VERSION}; "
            "use the hpcrun that made the sweep"
        )
    try:
        return SweepFile(folder, [SweepRun(run["name"], run["values"]) for run in content["runs"]])
    except (KeyError, TypeError) as error:
        raise damaged from error


def write_sweep(sweep: SweepFile) -> None:
    """Replace ``sweep.json`` in the folder of ``sweep``; raises OSError if the disk refuses."""
    # With a hash: a wrong name of an element would start another run.
    write_hashed(
        sweep.folder / NAME,
        {
            "version": VERSION,
            "runs": [{"name": run.name, "values": run.values} for run in sweep.runs],
        },
    )
