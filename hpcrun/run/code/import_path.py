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


def folders(path: Iterable[str] | None = None) -> list[str]:
    """Return ``path`` (None: ``sys.path``), and then the folders of setuptools' editable installs."""
    found = list(sys.path if path is None else path)
    for name, module in list(sys.modules.items()):
        if name.startswith("__editable__") and name.endswith("_finder"):
            for package, place in getattr(module, "MAPPING", {}).items():
                names, parts = tuple(package.split(".")), Path(place).with_suffix("").parts
                # A renamed package is not found by its own name in any folder.
                if parts[-len(names) :] == names:
                    found.append(str(Path(*parts[: -len(names)])))
    return list(dict.fromkeys(found))


def folders_of(program: str) -> list[str]:
    """Return the folders of the Python ``program``; for another program, those of this process."""
    path = shutil.which(program) if _PYTHON.fullmatch(Path(program).name) else None
    # Compare paths, not files: environments of the same Python share the file.
    if path is not None and os.path.abspath(path) != os.path.abspath(sys.executable):  # noqa: PTH100
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
            return folders(sys.path[1:])
    # Omit the first entry, which belongs to this program (`python -m`: the working folder).
    return folders(sys.path[1:])


def copied_path(
    path: Iterable[str], more: Iterable[str], copy_of: Callable[[Path], Path | None]
) -> list[str]:
    """Return ``path`` with the copy of each folder right before it, so that the order stays the same.

    The folders of ``more`` follow if they have a copy; other modules are found without them.
    """
    own, found = list(path), []
    for folder in [*own, *more]:
        copied = copy_of(Path(folder))
        if copied:
            found.append(str(copied))
        if copied or folder in own:
            found.append(folder)
    return list(dict.fromkeys(found))


if __name__ == "__main__":
    here = str(Path(__file__).parent)
    print(json.dumps([folder for folder in folders() if folder != here]))
