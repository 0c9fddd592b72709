"""The git work tree around a folder: its top, and the files that git shows."""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

from hpcrun.run.directory import RunError


def work_tree(folder: Path) -> tuple[Path | None, str]:
    """Return the top folder of the work tree around ``folder``, or None with the reason.

    The reason is empty if there is no work tree.
    """
    if shutil.which("git") is None:
        inside = any((parent / ".git").exists() for parent in (folder, *folder.parents))
        return None, "git is not on PATH" if inside else ""
    done = _git(folder, "rev-parse", "--show-toplevel")
    if done.returncode == 0:
        return Path(os.fsdecode(done.stdout.removesuffix(b"\n"))), ""
    words = _words(done)
    none = "not a git repository (or any" in words or "must be run in a work tree" in words
    return None, "" if none else f"git says: {words}"


def shown_files(top: Path) -> Iterator[Path]:
    """Yield the files and links of the work tree: tracked files, and new files that are not ignored.

    The files of submodules and of other nested repositories are included.

    Raises:
        RunError: git cannot list the files: an empty list would look like missing code.
    """
    done = _git(top, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    if done.returncode != 0:
        raise RunError(
            f"{top}: git cannot list the code for the snapshot: {_words(done)}; correct this, or use the "
            "working tree with --no-snapshot"
        )
    # In a merge, a file is listed once for each side.
    for name in dict.fromkeys(filter(None, done.stdout.split(b"\0"))):
        path = top / os.fsdecode(name)
        # os.path does not raise: this user may not have access to the folder.
        if os.path.islink(path) or os.path.isfile(path):  # noqa: PTH113, PTH114
            yield path
        elif path != top and os.path.lexists(path / ".git"):
            yield from shown_files(path)


def _git(folder: Path, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    done = subprocess.run(
        ["git", "-C", str(folder), *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env={**os.environ, "LC_ALL": "C"},
        check=False,
    )
    if done.returncode in (-signal.SIGINT, -signal.SIGTERM):
        # Ctrl-C in a terminal also reaches git.
        raise KeyboardInterrupt("nothing was submitted")
    return done


def _words(done: subprocess.CompletedProcess[bytes]) -> str:
    words = " ".join(done.stderr.decode(errors="replace").split())
    return words or f"git ended with code {done.returncode}"
