"""The copy of the code that a submission keeps, and its differences from the copy before."""

import filecmp
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from hpcrun.api.places import handle
from hpcrun.api.submission.continuing import shortened
from hpcrun.printing import say_aside
from hpcrun.run.directory import RunDirectory, read_record, remove_if_empty
from hpcrun.run.files import write_hashed
from hpcrun.run.snapshot import Snapshot, recorded_snapshot, take_snapshot


def keep_code(run: RunDirectory, wanted: bool | None) -> None:
    """Copy the code of the submission's folder to the run directory, if wanted, and record the copy.

    Args:
        wanted: None: as in the previous submission.

    Raises:
        OSError: the code cannot be copied.
    """
    facts = read_record(run)
    if wanted is None:
        wanted = facts.get("snapshot") is not False
    facts["snapshot"] = wanted
    with copied_code(run, facts, wanted) as snapshot:
        write_hashed(run.record, {**facts, "code": compared(run, snapshot)})


@contextmanager
def copied_code(
    run: RunDirectory, facts: Mapping[str, object], wanted: bool | None
) -> Iterator[Snapshot | None]:
    """Copy the code to the folder ``run``, if wanted; remove the copy if the block fails.

    Args:
        facts: the record of the previous submission; its folder has the code.
    """
    snapshot = None
    if wanted:
        snapshot, words = take_snapshot(run, Path(str(facts.get("folder") or Path.cwd())))
        if words:
            say_aside(f"hpcrun: {words}")
    try:
        yield snapshot
    except BaseException:
        if snapshot is not None:
            shutil.rmtree(snapshot.root, ignore_errors=True)
            remove_if_empty([snapshot.root.parent])
        raise


def compared(run: RunDirectory, snapshot: Snapshot | None) -> dict[str, str] | None:
    """Return the record of ``snapshot``; print its differences from the copy of the previous submission."""
    if snapshot is None:
        return None
    before = recorded_snapshot(run)
    if before is not None and (found := changes(before.root, snapshot.root)):
        reported = f"changed since the previous submission: {shortened(found)}"
        say_aside(f"hpcrun: {handle(run)}: {reported}; the run continues with the new code")
    return code_record(snapshot, run.path)


def code_record(snapshot: Snapshot, run: Path) -> dict[str, str]:
    """Return what run.json of the run in ``run`` says about the copy."""
    # A sweep keeps one copy, next to its elements.
    return {"root": os.path.relpath(snapshot.root, run), "source": str(snapshot.source)}


_PROGRAMS = {
    *(".py", ".pyi", ".pyx", ".pxd", ".so", ".sh"),
    *(".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp"),
}


def changes(before: Path, after: Path) -> list[str]:
    """Return the program files that differ between two folders, or are in one of the folders only.

    Other files are ignored: notes compute nothing, and the config is compared elsewhere.
    """
    old, new = _programs(before), _programs(after)
    _, differing, missing = filecmp.cmpfiles(before, after, old | new, shallow=False)
    return sorted([*differing, *missing])


def _programs(root: Path) -> set[str]:
    return {
        path.relative_to(root).as_posix()
        for path in root.rglob("*")
        if path.suffix in _PROGRAMS and path.is_file()
    }
