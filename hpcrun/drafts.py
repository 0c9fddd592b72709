"""Drafts: hidden files and folders that a process fills and then renames. A killed process leaves its draft.

The name of a draft tells the host and the process of its writer: ``.NAME.HOST-PID.RANDOM.tmp``.
This base module may be imported by every package.
"""

import contextlib
import os
import re
import shutil
import socket
import time
from pathlib import Path


def draft_of(path: Path) -> Path:
    """Return a new name next to ``path``, for a draft of this process."""
    writer = f"{socket.gethostname()}-{os.getpid()}"
    return path.with_name(f".{path.name}.{writer}.{os.urandom(6).hex()}.tmp")


def remove_left(path: Path, patience: float) -> None:
    """Remove the drafts of ``path`` whose writers were killed; a draft that cannot be removed stays.

    A draft of this host stays while its process runs. A draft of another host stays until nothing in it has
    changed for ``patience`` seconds, and so does a draft whose name tells no process.
    """
    named = re.compile(rf"\.{re.escape(path.name)}\.(?:(.+)-(\d+)\.)?[0-9a-f]{{8,12}}\.tmp")
    with contextlib.suppress(OSError):
        for draft in [*path.parent.iterdir()]:
            found = named.fullmatch(draft.name)
            if found is None:
                continue
            with contextlib.suppress(OSError):
                if found[1] == socket.gethostname():
                    left = not _runs(int(found[2]))
                else:
                    left = time.time() - _last_change(draft) > patience
                if left:
                    _remove(draft)


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # Of another user.
    return True


def _last_change(draft: Path) -> float:
    """Return the time of the last change of a file, or of a folder and its entries; raises OSError."""
    within = [*draft.iterdir()] if draft.is_dir() and not draft.is_symlink() else []
    return max(one.lstat().st_mtime for one in (draft, *within))


def _remove(draft: Path) -> None:
    if draft.is_dir() and not draft.is_symlink():
        shutil.rmtree(draft)
    else:
        draft.unlink()
