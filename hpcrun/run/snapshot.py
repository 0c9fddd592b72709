"""Snapshots of the submitted code, so that a requeue a day later runs the same code.

A snapshot contains all files that git shows: tracked files with uncommitted changes, new files that are not
ignored, and those of submodules. Data that git ignores is not copied; it is found because the job's working
folder does not change.

If git gives no answer, its error is reported: an empty list would look like missing code.
"""

import fnmatch
import itertools
import os
import shlex
import shutil
import signal
import stat
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpcrun.run.directory import RunDirectory, RunError
from hpcrun.run.files import make_numbered_folder, read_json
from hpcrun.run.import_path import copied_path, folders_of

MOST_BYTES = 200 * 2**20
MOST_FILES = 20_000
# Larger link targets and ignored files may be data.
_MOST_LINKED = 2**20
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


@dataclass
class _Plan:
    """Content of a copy: for files, destination and source; for links, destination and target."""

    files: dict[Path, Path] = field(default_factory=dict)
    links: dict[Path, Path] = field(default_factory=dict)


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
    source, why_not = work_tree(folder)
    if source is None:
        return None, why_not and f"no snapshot of the code: {why_not}; {_NO_PROBLEM}"
    shown = _not_of_runs(shown_files(source), source, folder, run.path)
    # A whole home folder may be a work tree.
    plan = _plan(source, itertools.islice(shown, MOST_FILES + 1))
    if too_much := _too_much(plan):
        return None, (
            f"no snapshot of the code: {source} has {too_much}, more than the limit of a snapshot; "
            f"{_NO_PROBLEM}"
        )
    # A new folder for each submission: the previous folder may belong to a running job.
    root = make_numbered_folder(run.code, 1, digits=3)
    try:
        unreadable = _copy(plan, root)
    except BaseException:
        shutil.rmtree(root, ignore_errors=True)
        raise
    return Snapshot(root, source), _without(unreadable)


def _copy(plan: _Plan, root: Path) -> list[Path]:
    """Fill ``root``, and return the files that cannot be read."""
    unreadable = []
    for place, path in plan.files.items():
        copy = root / place
        copy.parent.mkdir(parents=True, exist_ok=True)
        try:
            shutil.copy2(path, copy)
            # An edit in the copy would have no effect on the next submission.
            copy.chmod(stat.S_IMODE(copy.stat().st_mode) & ~0o222)
        except PermissionError as error:
            if error.filename != str(path):
                raise
            unreadable.append(path)
        except FileNotFoundError:
            # A temporary file of an editor has vanished since the listing.
            if path.exists():
                raise
    for place, target in plan.links.items():
        copy = root / place
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.symlink_to(target)
    return unreadable


def _without(unreadable: Sequence[Path]) -> str:
    if not unreadable:
        return ""
    more = f" and {len(unreadable) - 1} more" if len(unreadable) > 1 else ""
    return (
        f"the snapshot of the code does not contain {unreadable[0]}{more}: no permission to read;  "
        "change the permission, or let git ignore it"
    )


def _plan(source: Path, shown: Iterable[Path]) -> _Plan:
    plan = _Plan()
    inner = {}
    for path in shown:
        place = path.relative_to(source)
        if not path.is_symlink():
            plan.files[place] = path
            continue
        target = Path(os.path.realpath(path))
        if target.is_relative_to(source):
            inner[place] = target
        else:
            _follow(plan, place, target, source)
    _take_ignored_modules(plan, source)
    folders = {folder for place in plan.files for folder in place.parents}
    for place, target in inner.items():
        there = target.relative_to(source)
        if there in plan.files or there in folders:
            plan.links[place] = Path(os.path.relpath(there, place.parent))
        else:
            _follow(plan, place, target, source)
    # Git still lists files of a folder that has become a link.
    folders = {folder for place in plan.files for folder in place.parents}
    for place in [place for place in plan.links if place in plan.files or place in folders]:
        del plan.links[place]
    # A program still finds its `.env` next to its code.
    for place in [place for place, path in plan.files.items() if _is_private(path)]:
        plan.links[place] = plan.files.pop(place)
    return plan


def _is_private(path: Path) -> bool:
    return any(fnmatch.fnmatch(path.name.lower(), pattern) for pattern in PRIVATE)


def _follow(plan: _Plan, place: Path, target: Path, source: Path) -> None:
    """Copy the target of a link at ``place`` if it is code; otherwise link to the target.

    The target may exist only on the nodes, or may not be readable by this user.
    """
    if not os.access(target, os.R_OK):
        plan.links[place] = target
    elif target.is_dir() and _is_code(target) and not source.is_relative_to(target):
        for path in itertools.islice(_below(target), MOST_FILES + 1):
            _take(plan, place / path.relative_to(target), path)
    else:
        _take(plan, place, target)


def _take(plan: _Plan, place: Path, path: Path) -> None:
    small = path.is_file() and _size(path) <= _MOST_LINKED
    (plan.files if small else plan.links)[place] = path


def _is_code(folder: Path) -> bool:
    # A folder of data may have a million files.
    with os.scandir(folder) as entries:
        return any(entry.name.endswith(".py") for entry in itertools.islice(entries, 1000))


def _below(folder: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in ("__pycache__", ".git")]
        yield from (path for name in names if (path := Path(parent, name)).is_file())


def _take_ignored_modules(plan: _Plan, source: Path) -> None:
    """Copy ignored modules in the folders of copied modules: built extensions, a generated version file."""
    for folder in {place.parent for place in plan.files if place.suffix == ".py"}:
        if not (source / folder).is_dir():
            continue  # The folder is the target of a link.
        for path in (source / folder).iterdir():
            place = folder / path.name
            known = place in plan.files or place in plan.links
            if path.suffix in (".py", ".so") and not known and path.is_file():
                _take(plan, place, path)


def _not_of_runs(paths: Iterable[Path], source: Path, folder: Path, run: Path) -> Iterator[Path]:
    """Yield ``paths`` without run directories, environments, and the folder of this run.

    Each snapshot would otherwise contain all earlier snapshots. A copied environment does not work.
    """
    runs = Path(os.path.realpath(run.parent))
    # A runs directory that contains the code is recognized by its runs.
    known = {source: False} | ({} if folder.is_relative_to(runs) else {runs: True})

    def excluded(folder: Path) -> bool:
        if folder not in known:
            known[folder] = excluded(folder.parent) or _is_run(folder) or _is_environment(folder)
        return known[folder]

    return (path for path in paths if not excluded(path.parent))


def _is_run(folder: Path) -> bool:
    run = RunDirectory(folder)
    return run.exists() and run.logs.is_dir()


def _is_environment(folder: Path) -> bool:
    return (folder / "pyvenv.cfg").exists() or (folder / "conda-meta").exists()


def _too_much(plan: _Plan) -> str:
    if len(plan.files) + len(plan.links) > MOST_FILES:
        return f"more than {MOST_FILES} files"
    size = sum(_size(path) for path in plan.files.values())
    return f"{size / 2**20:.0f} MiB" if size > MOST_BYTES else ""


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


# Seconds: git asks a cold network file system for every file.
_PATIENCE = 300.0
_NOT_TRUSTED = "dubious ownership"
PRIVATE = (
    *("*.env", ".env.*", ".netrc", "_netrc", ".git-credentials", ".pgpass", ".pypirc", ".npmrc"),
    *("id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", "*.pem", "*.key", "*.ppk"),
    *("*.p12", "*.pfx", "*.jks", "*.kdbx", ".htpasswd", "credentials", "credentials.json"),
)
"""Names of files with passwords and keys, as docs/sites.md lists them: no content is copied to a run."""


def work_tree(folder: Path, *, patience: float = _PATIENCE) -> tuple[Path | None, str]:
    """Return the top folder of the work tree around ``folder``; ``patience``: seconds for git's answer.

    Returns:
        The folder, or None with the reason (empty: there is no work tree).

    Raises:
        RunError: git cannot read the work tree.
    """
    if shutil.which("git") is None:
        inside = any((parent / ".git").exists() for parent in (folder, *folder.parents))
        return None, "git is not on PATH" if inside else ""
    if not folder.is_dir():
        # Nothing can be copied, and the command itself gives the best error.
        return None, f"{folder} is gone"
    done = _git(folder, "rev-parse", "--show-toplevel", patience=patience)
    if done.returncode == 0:
        return Path(os.fsdecode(done.stdout.removesuffix(b"\n"))), ""
    words = _words(done)
    if "not a git repository (or any" in words or "must be run in a work tree" in words:
        return None, ""
    if _NOT_TRUSTED in words:
        return None, f"git says: {words}"
    raise _refusal(folder, words)


def shown_files(top: Path) -> Iterator[Path]:
    """Yield the files and links of the work tree: tracked files, and new files that are not ignored.

    The files of submodules and of other nested repositories are included.

    Raises:
        RunError: git cannot list the files.
    """
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
            yield from shown_files(path)


def _git(
    folder: Path, *arguments: str, patience: float = _PATIENCE
) -> subprocess.CompletedProcess[bytes]:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=patience,
            env={**os.environ, "LC_ALL": "C"},
            check=False,
        )
    except OSError as error:
        raise _refusal(folder, f"{error.filename}: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        words = f"`git {arguments[0]}` has not answered for {patience:.0f} s"
        raise _refusal(folder, words) from error
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
