"""The file ``sweep.json`` of a sweep folder: the axes, the runs with their values, and the submissions.

The folder ``runs/SWEEP`` holds this file and a run directory for each element: ``runs/SWEEP/000`` and so on.
An element keeps its name for good: a later submission adds elements and renames none.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hpcrun.run.directory import RunDirectory, RunError
from hpcrun.run.files import read_json, write_hashed

NAME = "sweep.json"
VERSION = 3


@dataclass(frozen=True)
class SweepRun:
    """One element: the ``name`` of its folder (``003``), and its value for each dotted key."""

    name: str
    values: Mapping[str, Any]


@dataclass(frozen=True)
class SweepSubmission:
    """One submission: its time (Unix seconds), executor, jobs and elements."""

    time: float
    executor: str
    jobs: Sequence[str]
    elements: Sequence[str]


@dataclass(frozen=True)
class SweepFile:
    """The content of ``sweep.json``. ``axes``: each dotted key with its values, in the user's order."""

    folder: Path
    name: str
    axes: Mapping[str, Sequence[Any]]
    runs: Sequence[SweepRun]
    submissions: Sequence[SweepSubmission] = field(default=())

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
        return SweepFile(
            folder,
            content["name"],
            content["axes"],
            [SweepRun(run["name"], run["values"]) for run in content["runs"]],
            [SweepSubmission(**one) for one in content["submissions"]],
        )
    except (KeyError, TypeError) as error:
        raise damaged from error


def write_sweep(sweep: SweepFile) -> None:
    """Replace ``sweep.json`` in the folder of ``sweep``; raises OSError if the disk refuses."""
    # With a hash: a wrong name of an element would start another run.
    write_hashed(
        sweep.folder / NAME,
        {
            "version": VERSION,
            "name": sweep.name,
            "axes": sweep.axes,
            "runs": [{"name": run.name, "values": run.values} for run in sweep.runs],
            "submissions": [asdict(one) for one in sweep.submissions],
        },
    )
