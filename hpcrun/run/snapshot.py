"""A copy of the code as it was submitted, so that a requeue a day later runs what was submitted.

Everything that git would show a reader is copied: tracked files as they lie there, uncommitted changes
included, and new ones that are not ignored. Data that git ignores is found where it was: the job's
working folder does not change.
"""

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcrun.run.directory import RunDirectory
from hpcrun.run.files import read_json

MOST_BYTES = 200 * 2**20
MOST_FILES = 20_000


@dataclass(frozen=True)
class Snapshot:
    """Where the copy of a repository lies: ``root`` is the copy of ``source``, its top folder."""

    root: Path
    source: Path

    def copy_of(self, path: Path) -> Path | None:
        """The copy of ``path``, or None for what was not copied."""
        try:
            copied = self.root / path.absolute().relative_to(self.source)
        except ValueError:
            return None
        return copied if copied.exists() else None


def recorded_snapshot(run: RunDirectory) -> Snapshot | None:
    """The snapshot of the run's newest submission; None when it took none, or it was deleted."""
    code = (read_json(run.record) or {}).get("code")
    if not isinstance(code, dict):
        return None
    snapshot = Snapshot(run.path / str(code.get("root")), Path(str(code.get("source"))))
    return snapshot if snapshot.root.is_dir() else None


def snapshot_command(
    snapshot: Snapshot, command: Sequence[str], folder: Path
) -> tuple[list[str], dict[str, str]]:
    """``command``, to be run in ``folder``, with every file it names replaced by its copy.

    Returns:
        The command, and variables for ``python -m``, whose module is looked up along PYTHONPATH instead
        of in the working folder (PYTHONSAFEPATH: Python 3.11 and later).
    """
    words = [_copied_word(snapshot, word, folder) for word in command]
    copied = snapshot.copy_of(folder)
    if "-m" not in words[:4] or copied is None:
        return words, {}
    path = os.pathsep.join(filter(None, [str(copied), os.environ.get("PYTHONPATH")]))
    return words, {"PYTHONSAFEPATH": "1", "PYTHONPATH": path}


def _copied_word(snapshot: Snapshot, word: str, folder: Path) -> str:
    path = folder / word
    # Code only: data, even in git, is read from where it lies, and may be written there.
    if path.suffix not in (".py", ".sh") or not path.is_file():
        return word
    copied = snapshot.copy_of(path)
    return word if copied is None else str(copied)


def take_snapshot(run: RunDirectory, folder: Path) -> tuple[Snapshot | None, str]:
    """Copy the git work tree around ``folder`` into the run directory.

    Returns:
        The snapshot, or None with the reason why there is none (empty: no git work tree).

    Raises:
        OSError: the run directory cannot be written.
    """
    top = _git(folder, "rev-parse", "--show-toplevel")
    if top is None:
        return None, ""
    source = Path(os.fsdecode(top.rstrip(b"\n")))
    listed = _git(source, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    # A deleted file is still listed; a submodule is listed as its folder.
    names = [name for name in (listed or b"").split(b"\0") if name]
    files = [path for name in names if (path := source / os.fsdecode(name)).is_file()]
    files = [path for path in files if not path.is_relative_to(run.path.parent)]
    size = sum(path.lstat().st_size for path in files)
    if len(files) > MOST_FILES or size > MOST_BYTES:
        return None, (
            f"{source} holds {len(files)} files of {size / 2**20:.0f} MiB for git, more than a snapshot "
            f"takes ({MOST_FILES} files, {MOST_BYTES // 2**20} MiB)"
        )
    root = _next_folder(run)
    for path in files:
        copy = root / path.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, copy, follow_symlinks=False)
    return Snapshot(root, source), ""


def _next_folder(run: RunDirectory) -> Path:
    """A new folder for each submission: the one before may belong to a job that still runs."""
    number = 1
    while True:
        folder = run.code / f"{number:03d}"
        try:
            folder.mkdir(parents=True, mode=0o700)
        except FileExistsError:
            number += 1
            continue
        return folder


def _git(folder: Path, *arguments: str) -> bytes | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
