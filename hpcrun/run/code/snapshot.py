"""Snapshots of the submitted code, so that a requeue a day later runs the same code.

A snapshot contains all files that git shows: tracked files with uncommitted changes, new files that are not
ignored, and those of submodules. Data that git ignores is not copied; it is found because the job's working
folder does not change.
"""

import itertools
import os
import shutil
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcrun.run.code.import_path import copied_path, folders_of
from hpcrun.run.code.work_tree import shown_files, work_tree
from hpcrun.run.directory import RunDirectory
from hpcrun.run.io.files import make_numbered_folder, read_json
from hpcrun.run.leftover_folders import holds_only_logs

MOST_BYTES = 200 * 2**20
MOST_FILES = 20_000


@dataclass(frozen=True)
class Snapshot:
    """A copy of a repository: ``root`` is the copy of ``source``, its top folder."""

    root: Path
    source: Path

    def copy_of(self, path: Path) -> Path | None:
        """Return the copy of ``path``, or None if it was not copied."""
        # First as spelled: a link in the work tree is a link in the copy.
        for spelled in (path.absolute(), Path(os.path.realpath(path))):
            if spelled.is_relative_to(self.source):
                copied = self.root / spelled.relative_to(self.source)
                if copied.exists():
                    return copied
        return None


def recorded_snapshot(run: RunDirectory) -> Snapshot | None:
    """Return the snapshot of the run's newest submission; None if there is none, or it was deleted."""
    code = (read_json(run.record) or {}).get("code")
    if not isinstance(code, dict):
        return None
    snapshot = Snapshot(run.path / str(code.get("root")), Path(str(code.get("source"))))
    return snapshot if snapshot.root.is_dir() else None


def snapshot_command(
    snapshot: Snapshot, command: Sequence[str], folder: Path
) -> tuple[list[str], dict[str, str]]:
    """Return ``command``, for ``folder``, with each code file replaced by its copy.

    Returns:
        The command, and its variables: PYTHONPATH, if modules come from the work tree. ``python -m`` also
        gets PYTHONSAFEPATH (Python 3.11 and later), so that it finds the module in the copy and not in the
        working folder.
    """
    words = [_copied_word(snapshot, word, folder) for word in command]
    path = [
        str(folder / entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry
    ]
    # Folders from a .pth file or an import hook (`pip install --editable`) come last.
    found = copied_path(path, folders_of(command[0]), snapshot.copy_of)
    copied = snapshot.copy_of(folder)
    if "-m" in words[:4] and copied is not None:
        return words, {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join([str(copied), *found])}
    return words, {"PYTHONPATH": os.pathsep.join(found)} if found != path else {}


def _copied_word(snapshot: Snapshot, word: str, folder: Path) -> str:
    path = folder / word
    # Only code: data, even in git, is read from its original place, and may be written there.
    if path.suffix not in (".py", ".sh") or not path.is_file():
        return word
    copied = snapshot.copy_of(path)
    return word if copied is None else str(copied)


def take_snapshot(run: RunDirectory, folder: Path) -> tuple[Snapshot | None, str]:
    """Copy the git work tree around ``folder`` into the run directory.

    Returns:
        The snapshot, or None without a git work tree; and a message for the user, or "".

    Raises:
        RunError: git cannot list the files.
        OSError: the run directory cannot be written.
    """
    paths: list[Path] = []
    source, why_not = work_tree(folder)
    if source is not None:
        shown = _not_of_runs(shown_files(source), source, folder, run.path)
        # A whole home folder may be a work tree.
        paths = list(itertools.islice(shown, MOST_FILES + 1))
        paths += _ignored_modules(paths)
        if too_much := _too_much(paths):
            why_not = f"{source} has {too_much}, more than the limit of a snapshot"
    if source is None or why_not:
        words = f"no snapshot of the code: {why_not}; accept this with --no-snapshot"
        return None, why_not and words
    # Each submission has a folder: the previous folder may belong to a running job.
    snapshot = Snapshot(make_numbered_folder(run.code, 1, digits=3), source)
    try:
        unreadable = _copy(paths, snapshot)
    except BaseException:
        shutil.rmtree(snapshot.root, ignore_errors=True)
        raise
    return snapshot, unreadable and (
        f"the snapshot of the code does not contain {unreadable}; change the permission, or let git ignore it"
    )


def _copy(paths: Iterable[Path], snapshot: Snapshot) -> str:
    """Copy ``paths``; return the first that cannot be read, with the reason, or ""."""
    unreadable = ""
    links = []
    for path in paths:
        if path.is_symlink():
            links.append(path)
            continue
        copy = snapshot.root / path.relative_to(snapshot.source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        try:
            shutil.copy2(path, copy)
            # An edit in the copy would have no effect on the next submission.
            copy.chmod(stat.S_IMODE(copy.stat().st_mode) & ~0o222)
        except (PermissionError, FileNotFoundError) as error:
            if error.filename != str(path):
                raise
            # A temporary file of an editor may have vanished since the listing.
            if path.exists():
                unreadable = unreadable or f"{path} ({error.strerror})"
    for path in links:
        copy = snapshot.root / path.relative_to(snapshot.source)
        target = Path(os.path.realpath(path))
        copied = snapshot.copy_of(target)
        copy.parent.mkdir(parents=True, exist_ok=True)
        # Git still lists files of a folder that has become a link.
        if not os.path.lexists(copy):
            copy.symlink_to(os.path.relpath(copied, copy.parent) if copied else target)
    return unreadable


def _ignored_modules(paths: Sequence[Path]) -> list[Path]:
    """Return ignored modules next to modules in ``paths``: built extensions, a generated version file."""
    known = set(paths)
    folders = {path.parent for path in paths if path.suffix == ".py"}
    found = (path for folder in folders for path in folder.iterdir() if path not in known)
    return [path for path in found if path.suffix in (".py", ".so") and path.is_file()]


def _not_of_runs(paths: Iterable[Path], source: Path, folder: Path, run: Path) -> Iterator[Path]:
    """Yield ``paths`` without run directories, environments, and the folder of this run.

    Each snapshot would otherwise contain all earlier snapshots. A copied environment does not work.
    """
    runs = Path(os.path.realpath(run.parent))
    # A runs directory that contains the code is recognized by its runs.
    known = {source: False} | ({} if folder.is_relative_to(runs) else {runs: True})

    def excluded(folder: Path) -> bool:
        if folder not in known:
            known[folder] = (
                excluded(folder.parent)
                or _is_run(folder)
                or holds_only_logs(folder)
                or _is_environment(folder)
            )
        return known[folder]

    return (path for path in paths if not excluded(path.parent))


def _is_run(folder: Path) -> bool:
    run = RunDirectory(folder)
    return run.exists() and run.logs.is_dir()


def _is_environment(folder: Path) -> bool:
    return (folder / "pyvenv.cfg").exists() or (folder / "conda-meta").exists()


def _too_much(paths: Sequence[Path]) -> str:
    if len(paths) > MOST_FILES:
        return f"more than {MOST_FILES} files"
    size = sum(path.lstat().st_size for path in paths if os.path.lexists(path))
    return f"{size / 2**20:.0f} MiB" if size > MOST_BYTES else ""
