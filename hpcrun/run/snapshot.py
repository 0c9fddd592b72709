"""Snapshots of the submitted code, so that a requeue a day later runs the same code.

A snapshot contains the files that git lists: tracked files with uncommitted changes, new files that are not
ignored, and those of submodules. Ignored data is not copied; it is found because the job's working folder
does not change.

If git gives no answer, its error is reported: an empty list would look like missing code.
"""

import contextlib
import fnmatch
import itertools
import os
import shlex
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcrun.run.directory import RunDirectory, RunError
from hpcrun.run.files import make_numbered_folder, read_json

MOST_BYTES = 200 * 2**20
MOST_FILES = 20_000
_NO_PROBLEM = "accept this with --no-snapshot"


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
    # Folders from a .pth file or an import hook (`pip install --editable`) come last. The first entry of
    # sys.path belongs to this program.
    found = copied_path(path, import_folders()[1:], snapshot)
    copied = snapshot.copy_of(folder)
    if "-m" in words[:4] and copied is not None:
        return words, {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join([str(copied), *found])}
    return words, {"PYTHONPATH": os.pathsep.join(found)} if found != path else {}


def import_folders() -> list[str]:
    """Return ``sys.path`` of this process, and then the folders of setuptools' editable installs."""
    found = list(sys.path)
    for name, module in list(sys.modules.items()):
        if name.startswith("__editable__") and name.endswith("_finder"):
            for package, place in getattr(module, "MAPPING", {}).items():
                parts, path = tuple(package.split(".")), Path(place)
                # A folder with a package under another name is no use.
                if (*path.parts[:-1], path.stem)[-len(parts) :] == parts:
                    found.append(str(path.parents[len(parts) - 1]))
    return found


def copied_path(path: Iterable[str], more: Iterable[str], snapshot: Snapshot) -> list[str]:
    """Return ``path`` with the copy of each folder right before it, so that the order stays the same.

    The folders of ``more`` follow if they have a copy; other modules are found without them.
    """
    found = []
    for folder in path:
        copied = snapshot.copy_of(Path(folder))
        found += [str(copied), folder] if copied else [folder]
    for folder in more:
        if copied := snapshot.copy_of(Path(folder)):
            found += [str(copied), folder]
    return list(dict.fromkeys(found))


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
    source, places, why_not = code_files(folder, run.path)
    if source is None:
        return None, why_not and f"no snapshot of the code: {why_not}; {_NO_PROBLEM}"
    # A new folder for each submission: the previous folder may belong to a running job.
    root = make_numbered_folder(run.code, 1, digits=3)
    try:
        _copy(places, source, root)
    except BaseException:
        shutil.rmtree(root, ignore_errors=True)
        raise
    return Snapshot(root, source), ""


def code_files(folder: Path, run: Path) -> tuple[Path | None, set[Path], str]:
    """Return the top of the git work tree around ``folder`` and its code files, relative to the top.

    The top is None without a work tree, or if its files cannot be copied; the text then has the reason, empty
    for no work tree. ``run``: a run directory; nothing in its parent folder is code.

    Raises:
        RunError: git cannot list the files.
    """
    source, why_not = _work_tree(folder)
    if source is None:
        return None, set(), why_not
    listed = _not_of_runs(_listed(source), source, folder, run)
    # A whole home folder may be a work tree.
    places = {path.relative_to(source) for path in itertools.islice(listed, MOST_FILES + 1)}
    places |= set(_ignored_modules(places, source))
    if too_much := _too_much(places, source):
        return None, set(), f"{source} has {too_much}, more than the limit of a snapshot"
    return source, places, ""


def _copy(places: set[Path], source: Path, root: Path) -> None:
    """Fill ``root`` with the files at ``places`` of ``source``; a link leads to a copy or to the original."""
    folders = {folder for place in places for folder in place.parents}
    # Git still lists the files of a folder that has become a link.
    for place in places - folders:
        path, copy = source / place, root / place
        copy.parent.mkdir(parents=True, exist_ok=True)
        target = Path(os.path.realpath(path))
        inside = target.relative_to(source) if target.is_relative_to(source) else None
        if path.is_symlink() and inside in places | folders:
            copy.symlink_to(os.path.relpath(root / inside, copy.parent))
        elif path.is_symlink() or is_private(path):
            # A program still finds its `.env` next to its code.
            copy.symlink_to(target)
        else:
            # A temporary file of an editor may have vanished since the listing.
            with contextlib.suppress(FileNotFoundError):
                shutil.copy2(path, copy)
                # An edit in the copy would have no effect on the next submission.
                copy.chmod(stat.S_IMODE(copy.stat().st_mode) & ~0o222)


def is_private(path: Path) -> bool:
    """Return True if the name of ``path`` is that of a file with passwords or keys."""
    return any(fnmatch.fnmatch(path.name.lower(), pattern) for pattern in PRIVATE)


def _ignored_modules(places: set[Path], source: Path) -> Iterator[Path]:
    """Yield ignored modules in the folders of listed modules: built extensions, a generated version file."""
    for folder in {place.parent for place in places if place.suffix == ".py"}:
        if (source / folder).is_dir():
            for path in (source / folder).iterdir():
                if path.suffix in (".py", ".so") and path.is_file():
                    yield folder / path.name


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
                or (RunDirectory(folder).exists() and RunDirectory(folder).logs.is_dir())
                or (folder / "pyvenv.cfg").exists()
                or (folder / "conda-meta").exists()
            )
        return known[folder]

    return (path for path in paths if not excluded(path.parent))


def _too_much(places: set[Path], source: Path) -> str:
    if len(places) > MOST_FILES:
        return f"more than {MOST_FILES} files"
    size = sum((source / place).lstat().st_size for place in places if (source / place).exists())
    return f"{size / 2**20:.0f} MiB" if size > MOST_BYTES else ""


_NOT_TRUSTED = "dubious ownership"
PRIVATE = (
    *("*.env", ".env.*", ".netrc", "_netrc", ".git-credentials", ".pgpass", ".pypirc", ".npmrc"),
    *("id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", "*.pem", "*.key", "*.ppk"),
    *("*.p12", "*.pfx", "*.jks", "*.kdbx", ".htpasswd", "credentials", "credentials.json"),
)
"""Names of files with passwords and keys, as docs/sites.md lists them: no content is copied to a run."""


def _work_tree(folder: Path) -> tuple[Path | None, str]:
    """Return the top folder of the work tree around ``folder``, or None with the reason (empty: no tree)."""
    if shutil.which("git") is None:
        inside = any((parent / ".git").exists() for parent in (folder, *folder.parents))
        return None, "git is not on PATH" if inside else ""
    if not folder.is_dir():
        # Nothing can be copied, and the command itself gives the best error.
        return None, f"{folder} is gone"
    done = _git(folder, "rev-parse", "--show-toplevel")
    if done.returncode == 0:
        return Path(os.fsdecode(done.stdout.removesuffix(b"\n"))), ""
    words = _words(done)
    if "not a git repository (or any" in words or "must be run in a work tree" in words:
        return None, ""
    if _NOT_TRUSTED in words:
        return None, f"git says: {words}"
    raise _refusal(folder, words)


def _listed(top: Path) -> Iterator[Path]:
    """Yield the tracked files, and the new files that are not ignored, of ``top`` and repositories in it."""
    done = _git(top, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    if done.returncode != 0:
        raise _refusal(top, _words(done))
    # In a merge, a file is listed once for each side.
    for name in dict.fromkeys(filter(None, done.stdout.split(b"\0"))):
        path = top / os.fsdecode(name)
        # os.path does not raise: this user may not have access to the folder.
        if os.path.islink(path) or os.path.isfile(path):  # noqa: PTH113, PTH114
            yield path
        elif path != top and os.path.lexists(path / ".git"):
            yield from _listed(path)


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
    lines = done.stderr.decode(errors="replace").splitlines()
    first = next((line for line in lines if line.startswith(("fatal: ", "error: "))), "")
    words = first.partition(": ")[2] or f"git ended with code {done.returncode}"
    if _NOT_TRUSTED in words:
        named = words.partition("'")[2].partition("'")[0]
        trust = f"git config --global --add safe.directory {shlex.quote(named)}"
        return f"{words}; if you trust its owner: `{trust}`"
    return words


def _refusal(folder: Path, words: str) -> RunError:
    return RunError(
        f"{folder}: git cannot list the code for the snapshot: {words}; correct this, or use the working "
        "tree with --no-snapshot"
    )
