"""The folders in which a Python searches for modules: its path, and those of editable installs.

Run as a script, this file prints these folders for the Python that runs it.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

_PYTHON = re.compile(r"python[0-9.]*")
# Seconds for another Python to start, from a disk that many ranks read at the same time.
_PATIENCE = 60.0


def folders() -> list[str]:
    """Return ``sys.path`` of this process, and then the folders of setuptools' editable installs."""
    return _with_mapped(sys.path)


def _with_mapped(path: Iterable[str]) -> list[str]:
    found = list(path)
    for name, module in list(sys.modules.items()):
        if name.startswith("__editable__") and name.endswith("_finder"):
            found += _mapped(getattr(module, "MAPPING", {}))
    return list(dict.fromkeys(found))


def folders_of(program: str) -> list[str]:
    """Return the folders of the Python ``program``; for another program, those of this process."""
    path = shutil.which(program) if _PYTHON.fullmatch(Path(program).name) else None
    # Compare paths, not files: environments of the same Python share the file.
    if path is None or os.path.abspath(path) == os.path.abspath(sys.executable):  # noqa: PTH100
        return _inherited()
    try:
        asked = subprocess.run(
            [path, str(Path(__file__))],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_PATIENCE,
            check=True,
        )
        return [str(folder) for folder in json.loads(asked.stdout.splitlines()[-1])]
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        # A Python that does not start reports the error itself when it runs the command.
        return _inherited()


def _inherited() -> list[str]:
    # Omit the first entry, which belongs to this program (`python -m`: the working folder).
    return _with_mapped(sys.path[1:])


def copied_path(
    path: Iterable[str], more: Iterable[str], copy_of: Callable[[Path], Path | None]
) -> list[str]:
    """Return ``path`` with the copy of each folder right before it, so that the order stays the same.

    The folders of ``more`` follow if they have a copy; other modules are found without them.
    """
    found = []
    for folder in path:
        copied = copy_of(Path(folder))
        found += [str(copied), folder] if copied else [folder]
    for folder in more:
        if copied := copy_of(Path(folder)):
            found += [str(copied), folder]
    return list(dict.fromkeys(found))


def _mapped(packages: dict[str, str]) -> list[str]:
    """Return the folders that contain packages under their own names; a renamed package has none."""
    found = []
    for package, place in packages.items():
        parts, path = tuple(package.split(".")), Path(place)
        if (*path.parts[:-1], path.stem)[-len(parts) :] == parts:
            found.append(str(path.parents[len(parts) - 1]))
    return found


if __name__ == "__main__":
    own = str(Path(__file__).parent)
    print(json.dumps([folder for folder in folders() if folder != own]))
