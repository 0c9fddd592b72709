"""Drafts: hidden files and folders that a process fills and then renames. A killed process leaves its draft.

The name of a draft has the place and the process of its writer: ``.NAME.SPACE-PID.RANDOM.tmp``.
This base module may be imported by every package.
"""

import contextlib
import errno
import functools
import os
import re
import shutil
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path

PATIENCE = 3600.0
"""Seconds after its last change for which a draft of another host may still be in use."""

SPECIAL = "is a device, a pipe or a socket, and no file"
_MAX_PID = 1 << 22  # PID_MAX_LIMIT of Linux (proc(5)).

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]")
_LONGEST_HOST = 64


@functools.cache
def process_space() -> str:
    """Return a name of the processes whose numbers have a meaning for this process: ``HOST-BOOT-NAMESPACE``.

    Two containers may have one host name, and each its own process 7 (pid_namespaces(7)).
    """
    # A container may have any name, such as one with a slash, and a file's name has at most 255 bytes.
    host = _NOT_IN_NAMES.sub("_", socket.gethostname())[:_LONGEST_HOST]
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        return f"{host}-{boot[:8]}-{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        # Without /proc, no other process counts as one that this process can see.
        return f"{host}-{os.urandom(4).hex()}-0"


def runs(process: object) -> bool:
    """Return True if ``process`` is the number of a process, in this process space, that has not ended."""
    if not isinstance(process, int) or not 0 < process <= _MAX_PID:
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # Of another user.
    return True


def draft_of(path: Path) -> Path:
    """Return a new name next to ``path``, for a draft of this process."""
    writer = f"{process_space()}-{os.getpid()}"
    return path.with_name(f".{path.name}.{writer}.{os.urandom(6).hex()}.tmp")


def is_special(path: Path) -> bool:
    """Return True if ``path`` is a device, a pipe or a socket, such as /dev/null."""
    try:
        kind = stat.S_IFMT(path.lstat().st_mode)
    except OSError:  # missing, or the caller's own access reports the error
        return False
    return kind not in (stat.S_IFREG, stat.S_IFLNK, stat.S_IFDIR)


@contextlib.contextmanager
def replacing(path: Path, mode: int = 0o600) -> Iterator[Path]:
    """Yield an empty draft for the block to fill; then ``path`` becomes the draft atomically and durably.

    A reader or a crash sees the old or the new file. The drafts of killed writers are removed first.

    Raises:
        OSError: the disk refused, or ``path`` is a device, a pipe or a socket, which a rename would destroy;
            it is unchanged and the draft is removed.
    """
    if is_special(path):
        raise OSError(errno.EINVAL, SPECIAL, str(path))
    remove_left(path)
    draft = draft_of(path)
    try:
        os.close(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))
        yield draft
        sync(draft)
        draft.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise
    # Only the fsync of the folder makes a rename durable (rename(2), fsync(2)).
    sync(path.parent)


@contextlib.contextmanager
def draft_folder(path: Path, *, mode: int = 0o777) -> Iterator[Path]:
    """Yield a new folder next to ``path``, with its parents; remove it after the block unless it was moved.

    The drafts of killed writers are removed first, as :func:`remove_left` does. Raises OSError.
    """
    remove_left(path)
    folder = draft_of(path)
    folder.mkdir(mode, parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def sync(path: Path) -> None:
    """Write a file, or the names in a folder, to the disk (fsync(2)). Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_left(path: Path, patience: float = PATIENCE) -> None:
    """Remove the drafts of ``path`` whose writers were killed; a draft that cannot be removed stays.

    A draft of this process space stays while its process runs. Another draft stays until nothing in it has
    changed for ``patience`` seconds: of another host or container, of before the last boot, or with a name
    that tells no process.
    """
    named = re.compile(rf"\.{re.escape(path.name)}\.(?:(.+)-(\d+)\.)?[0-9a-f]{{8,12}}\.tmp")
    with contextlib.suppress(OSError), os.scandir(path.parent) as entries:
        for name in [entry.name for entry in entries]:
            found = named.fullmatch(name)
            if found is None:
                continue
            draft = path.with_name(name)
            with contextlib.suppress(OSError):
                if found[1] == process_space():
                    left = not runs(int(found[2]))
                else:
                    left = time.time() - _last_change(draft) > patience
                if left:
                    _remove(draft)


def _last_change(draft: Path) -> float:
    """Return the time of the last change of a file, or of a folder and its entries; raises OSError."""
    within = [*draft.iterdir()] if draft.is_dir() and not draft.is_symlink() else []
    return max(one.lstat().st_mtime for one in (draft, *within))


def _remove(draft: Path) -> None:
    if draft.is_dir() and not draft.is_symlink():
        shutil.rmtree(draft)
    else:
        draft.unlink()
