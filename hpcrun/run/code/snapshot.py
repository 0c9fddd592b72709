"""A copy of the code as it was submitted, so that a requeue a day later runs what was submitted.

Everything that git would show a reader is copied: tracked files as they lie there, uncommitted changes
included, new ones that are not ignored, and those of submodules. Data that git ignores is found where
it was: the job's working folder does not change.
"""

import itertools
import os
import shutil
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpcrun.run.code.import_path import copied_path, folders_of
from hpcrun.run.code.work_tree import shown_files, work_tree
from hpcrun.run.directory import RunDirectory
from hpcrun.run.io.files import read_json
from hpcrun.run.leftovers import is_husk

MOST_BYTES = 200 * 2**20
MOST_FILES = 20_000
# What a link leads to outside of the work tree, and what git ignores beside modules, may be data.
_MOST_LINKED = 2**20
_NO_PROBLEM = "--no-snapshot says this is fine"


@dataclass(frozen=True)
class Snapshot:
    """Where the copy of a repository lies: ``root`` is the copy of ``source``, its top folder."""

    root: Path
    source: Path

    def copy_of(self, path: Path) -> Path | None:
        """The copy of ``path``, or None for what was not copied."""
        # As it is spelled first: a link in the work tree is one in the copy.
        for spelled in (path.absolute(), Path(os.path.realpath(path))):
            if spelled.is_relative_to(self.source):
                copied = self.root / spelled.relative_to(self.source)
                if copied.exists():
                    return copied
        return None


@dataclass
class _Plan:
    """What goes into a copy: a file's place there and where it lies, a link's place and its text."""

    files: dict[Path, Path] = field(default_factory=dict)
    links: dict[Path, Path] = field(default_factory=dict)


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
        The command, and variables for it: PYTHONPATH, where modules come from the work tree. For
        ``python -m``, whose module is looked up along it instead of in the working folder
        (PYTHONSAFEPATH: Python 3.11 and later).
    """
    words = [_copied_word(snapshot, word, folder) for word in command]
    path = [
        str(folder / entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry
    ]
    # Those that a .pth file or an import hook adds, as `pip install --editable` does, come after them.
    found = copied_path(path, folders_of(command[0]), snapshot.copy_of)
    copied = snapshot.copy_of(folder)
    if "-m" in words[:4] and copied is not None:
        return words, {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join([str(copied), *found])}
    return words, {"PYTHONPATH": os.pathsep.join(found)} if found != path else {}


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
        The snapshot, or None where there is no git work tree; and what to tell of either, if anything.

    Raises:
        RunError: git cannot list the files.
        OSError: the run directory cannot be written.
    """
    source, why_not = work_tree(folder)
    if source is None:
        return None, why_not and f"no snapshot of the code: {why_not}; {_NO_PROBLEM}"
    shown = _not_of_runs(shown_files(source), source, folder, run.path)
    # Somebody's whole home may be a work tree.
    plan = _plan(source, itertools.islice(shown, MOST_FILES + 1))
    if too_much := _too_much(plan):
        return None, (
            f"no snapshot of the code: {source} holds {too_much} for git, more than a snapshot takes; "
            f"{_NO_PROBLEM}"
        )
    root = _next_folder(run)
    try:
        unreadable = _copy(plan, root)
    except BaseException:
        shutil.rmtree(root, ignore_errors=True)
        raise
    return Snapshot(root, source), _without(unreadable)


def _copy(plan: _Plan, root: Path) -> list[Path]:
    """Fill ``root``; returns the files that may not be read."""
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
            # An editor's own file, gone since it was listed.
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
        f"the snapshot of the code goes without {unreadable[0]}{more}: no permission to read; "
        "mend that, or let git ignore it"
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
    # Git still lists the files of a folder that has become a link.
    folders = {folder for place in plan.files for folder in place.parents}
    for place in [place for place in plan.links if place in plan.files or place in folders]:
        del plan.links[place]
    return plan


def _follow(plan: _Plan, place: Path, target: Path, source: Path) -> None:
    """Take what a link at ``place`` leads to where that is code, else a link to where it lies.

    It may be there on the nodes only, or not for this user's eyes.
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
    """Modules beside copied ones are imported with them: extensions built there, a generated version."""
    for folder in {place.parent for place in plan.files if place.suffix == ".py"}:
        if not (source / folder).is_dir():
            continue  # What a link leads to.
        for path in (source / folder).iterdir():
            place = folder / path.name
            known = place in plan.files or place in plan.links
            if path.suffix in (".py", ".so") and not known and path.is_file():
                _take(plan, place, path)


def _not_of_runs(paths: Iterable[Path], source: Path, folder: Path, run: Path) -> Iterator[Path]:
    """Leave out what lies in a run directory, or beside this one (each run would hold all before it), and
    environments: a copy of one is none."""
    runs = Path(os.path.realpath(run.parent))
    # A runs directory that holds the code is known by its runs.
    known = {source: False} | ({} if folder.is_relative_to(runs) else {runs: True})

    def left_out(folder: Path) -> bool:
        if folder not in known:
            known[folder] = (
                left_out(folder.parent)
                or _is_run(folder)
                or is_husk(folder)
                or _is_environment(folder)
            )
        return known[folder]

    return (path for path in paths if not left_out(path.parent))


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
