"""Where a Python looks for modules: along its path, and where editable installs send it.

Run as a file, it tells that of the Python that runs it, which may be any.
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
# Seconds for another Python to start, from a disk that many ranks read at once.
_PATIENCE = 60.0


def folders() -> list[str]:
    """This process's ``sys.path``, and after it the folders that setuptools' editable installs lead to."""
    return _with_mapped(sys.path)


def _with_mapped(path: Iterable[str]) -> list[str]:
    found = list(path)
    for name, module in list(sys.modules.items()):
        if name.startswith("__editable__") and name.endswith("_finder"):
            found += _mapped(getattr(module, "MAPPING", {}))
    return list(dict.fromkeys(found))


def folders_of(program: str) -> list[str]:
    """The same of the Python called ``program``; of this one where it is no Python, but may start one."""
    path = shutil.which(program) if _PYTHON.fullmatch(Path(program).name) else None
    # Not the same file: environments of one Python share it.
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
        # One that does not start says so itself when it is to run the command.
        return _inherited()


def _inherited() -> list[str]:
    # The first is this program's own, for `python -m` the working folder: a script does not look there.
    return _with_mapped(sys.path[1:])


def copied_path(
    path: Iterable[str], more: Iterable[str], copy_of: Callable[[Path], Path | None]
) -> list[str]:
    """``path`` with the copy of each folder right before it, so that nothing changes its rank otherwise.

    Those of ``more`` follow of which there is a copy: the rest is found as it was.
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
    """The folders in which packages lie under their own names; one that is renamed has none."""
    found = []
    for package, place in packages.items():
        parts, path = tuple(package.split(".")), Path(place)
        if (*path.parts[:-1], path.stem)[-len(parts) :] == parts:
            found.append(str(path.parents[len(parts) - 1]))
    return found


if __name__ == "__main__":
    own = str(Path(__file__).parent)
    print(json.dumps([folder for folder in folders() if folder != own]))
