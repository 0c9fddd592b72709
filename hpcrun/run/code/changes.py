"""Differences between two snapshots of the code, file by file."""

import difflib
from pathlib import Path

_PROGRAMS = {
    *(".py", ".pyi", ".pyx", ".pxd", ".so", ".sh"),
    *(".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp"),
}
_MOST_BYTES = 1 << 20
"""Maximum size of a file for the comparison line by line."""


def changes(before: Path, after: Path) -> list[str]:
    """Return a line for each program file that differs between two folders: ``img.py: 3 lines differ``.

    Other files are ignored: notes compute nothing, and the config is compared elsewhere.
    """
    old, new = _programs(before), _programs(after)
    found = []
    for name in sorted(old.keys() | new.keys()):
        if name not in new:
            found.append(f"{name} is gone")
        elif name not in old:
            found.append(f"{name} is new")
        elif (lines := _lines_that_differ(old[name], new[name])) is not None:
            found.append(f"{name}: {lines}")
    return found


def _programs(root: Path) -> dict[str, Path]:
    return {
        path.relative_to(root).as_posix(): path
        for path in root.rglob("*")
        if path.suffix in _PROGRAMS and path.is_file()
    }


def _lines_that_differ(old: Path, new: Path) -> str | None:
    before, after = old.read_bytes(), new.read_bytes()
    if before == after:
        return None
    if max(len(before), len(after)) > _MOST_BYTES or b"\0" in before + after:
        return "differs"
    matcher = difflib.SequenceMatcher(None, before.split(b"\n"), after.split(b"\n"), autojunk=False)
    count = sum(
        max(end - start, other_end - other_start)
        for kind, start, end, other_start, other_end in matcher.get_opcodes()
        if kind != "equal"
    )
    return "1 line differs" if count == 1 else f"{count} lines differ"
