"""The folder of a sweep on disk: all its run directories appear together, or none.

A single run directory is fsynced file by file. For a thousand of them that takes half a minute. Here all
files are written first, then one syncfs(2) makes them durable, and then they become visible.
"""

import contextlib
import ctypes
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcrun.run import directory
from hpcrun.run.directory import RunDirectory, RunError
from hpcrun.run.io.files import hashed_json, sync_directory, with_comment_crc
from hpcrun.run.leftover_folders import make_staged
from hpcrun.run.leftover_folders import sweep as remove_abandoned

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class NewRun:
    """A run directory to make: its name, the text of its config, and its batch script if it has one.

    ``record``: the fields of its ``run.json`` that other runs lack.
    """

    name: str
    config: str
    script: str | None = None
    record: Mapping[str, Any] = field(default_factory=dict)


@contextmanager
def made_folder(folder: Path) -> Iterator[None]:
    """Make the folder of a sweep if it is missing; if the block fails and the folder is empty, remove it.

    Raises:
        RunError: something else has the name, or the folder cannot be made.
    """
    run = RunDirectory(folder)
    if run.exists():
        raise RunError(f"{folder}: is a single run; choose another --name for the sweep")
    missing = [path for path in (folder, *folder.parents) if not os.path.lexists(path)]
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(
            f"{folder}: cannot be made: {error.strerror}; choose a writable place with --runs-dir"
        ) from error
    directory.refuse_if_writable_by_others(run)
    try:
        yield
    except BaseException:
        directory.remove_if_empty(missing)
        raise


@contextmanager
def new_runs(
    folder: Path, runs: Iterable[NewRun], record: Mapping[str, Any], diff: str
) -> Iterator[None]:
    """Make run directories in ``folder``, visible together; remove them if the block fails.

    Args:
        record: the content of each ``run.json``.
        diff: the uncommitted changes; each run has a link to one file in ``folder``.

    Raises:
        OSError: the disk refuses; no run directory remains.
    """
    runs, published = list(runs), list[Path]()
    content = hashed_json(dict(record))
    staged = make_staged(folder / "sweep")
    try:
        remove_abandoned(staged)
        patch = _write_diff(folder, diff) if runs and diff else None
        for run in runs:
            own = hashed_json({**record, **run.record}) if run.record else content
            _fill(RunDirectory(staged / run.name), run, own, patch)
        sync_file_system(folder)
        for run in runs:
            (staged / run.name).rename(folder / run.name)
            published.append(folder / run.name)
        sync_directory(folder)
        yield
    except BaseException:
        for path in published:
            shutil.rmtree(path, ignore_errors=True)
        raise
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def _write_diff(folder: Path, diff: str) -> str:
    """Write the uncommitted changes once for all runs; return the link to them from a run directory."""
    number = 1
    while (path := folder / f"uncommitted-{number:03d}.patch").exists():
        number += 1
    path.write_text(diff, errors="surrogateescape")
    return f"../{path.name}"


def _fill(run: RunDirectory, new: NewRun, record: bytes, patch: str | None) -> None:
    for path in (run.path, run.checkpoints, run.logs):
        path.mkdir(mode=0o700)
    _write(run.config, with_comment_crc(new.config).encode())
    _write(run.record, record)
    if new.script is not None:
        _write(run.batch_script, new.script.encode())
    if patch is not None:
        run.diff.symlink_to(patch)


def _write(path: Path, content: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "wb") as stream:  # noqa: PTH123  (a descriptor, so that the mode holds)
        stream.write(content)


def sync_file_system(folder: Path) -> None:
    """Make all writes to the file system of ``folder`` durable (syncfs(2)).

    Raises:
        OSError: the disk refuses.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if _libc.syncfs(descriptor) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(folder))
    finally:
        with contextlib.suppress(OSError):
            os.close(descriptor)
