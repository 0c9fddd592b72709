"""Exceptions of the checkpoint store, and the classification of OSError."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hpcrun.errors import UserError


class CheckpointError(UserError):
    """A checkpoint cannot be saved, found or loaded; the text names the file and the remedy."""


class DamagedCheckpoint(CheckpointError):
    """A committed checkpoint differs from the bytes that were written.

    Attributes:
        file: name of the damaged file; None if the index is wrong although its bytes are unchanged.
    """

    def __init__(self, text: str, *, file: str | None = None) -> None:
        super().__init__(text)
        self.file = file


class ReadFailure(CheckpointError):
    """A node failed to read a checkpoint that is not known to be damaged. Another node may read it.

    ``here``: True on the ranks that failed to read.
    """

    def __init__(self, text: str, *, here: bool) -> None:
        super().__init__(text)
        self.here = here


class CheckpointWarning(UserWarning):
    """A remark on a save, such as its failure; training continues, and the next interval saves again."""


@contextmanager
def explained(doing: str, path: Path) -> Iterator[None]:
    """Convert an ``OSError`` of the block into a :class:`CheckpointError` that names ``path``."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path}: cannot {doing}: {reason(error)}") from error


def reason(error: OSError) -> str:
    """Return the system's text for ``error`` with its symbol: people search for both."""
    symbol = errno.errorcode.get(error.errno or 0)
    words = error.strerror or str(error)
    return f"{words} ({symbol})" if symbol else words


def is_space(error: OSError) -> bool:
    """Return True if the disk or the quota is full; the message then gives sizes."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def amount(size: int) -> str:
    """Format ``size`` bytes in decimal units, as ``df -H`` does."""
    value = float(size)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def refused_to_read(error: CheckpointError) -> bool:
    """Return True if the file system refused to read a file, which proves nothing about its content."""
    cause = error.__cause__
    return isinstance(cause, OSError) and not missing(cause)


def missing(error: OSError) -> bool:
    """Return True if the file does not exist or is not regular (EINVAL of ``FileSystem.open``)."""
    return error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EINVAL)


def vanished(error: OSError) -> bool:
    """Return True if a network file system may not show another node's change yet (NFS close-to-open)."""
    return error.errno in (errno.ENOENT, errno.ESTALE)


def occupied(error: OSError) -> bool:
    """Return True if rename(2) failed because the target exists; file systems use different codes."""
    return error.errno in (errno.ENOTEMPTY, errno.EEXIST)


def parent_of(path: Path) -> Path:
    """Return the nearest existing folder at or above ``path``, to query its file system."""
    while not os.path.lexists(path) and path != path.parent:
        path = path.parent
    return path
