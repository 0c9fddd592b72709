"""How a checkpoint goes wrong: it cannot be written, or what lies there is not what was written."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hpcrun.errors import UserError


class CheckpointError(UserError):
    """A checkpoint that cannot be saved, found or loaded; the text names the file and the remedy."""


class DamagedCheckpoint(CheckpointError):
    """A committed checkpoint whose bytes are not the ones that were written.

    Attributes:
        lasting: False where the file system refused to read, which may pass, and for a newer format.
        file: the name of the damaged file; None where the index is wrong, though its bytes are as written.
    """

    def __init__(self, text: str, *, lasting: bool = True, file: str | None = None) -> None:
        super().__init__(text)
        self.lasting = lasting
        self.file = file


class ReadFailure(CheckpointError):
    """A node failed to read a checkpoint that is not known to be damaged. Another node may read it.

    ``here``: True on the ranks that failed to read.
    """

    def __init__(self, text: str, *, here: bool) -> None:
        super().__init__(text)
        self.here = here


class CheckpointWarning(UserWarning):
    """A save failed while training goes on."""


@contextmanager
def explained(doing: str, path: Path) -> Iterator[None]:
    """Turn an ``OSError`` of the block into a :class:`CheckpointError` that names ``path``."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path}: cannot {doing}: {reason(error)}") from error


def reason(error: OSError) -> str:
    """The system's words for ``error``, with its symbol: people search for both."""
    symbol = errno.errorcode.get(error.errno or 0)
    words = error.strerror or str(error)
    return f"{words} ({symbol})" if symbol else words


def is_space(error: OSError) -> bool:
    """Whether the disk or the quota is full, so that figures help."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def amount(size: int) -> str:
    """``size`` bytes for people, in decimal units as ``df -H`` prints them."""
    value = float(size)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def refused_to_read(error: CheckpointError) -> bool:
    """Return True where the file system gave no answer on a file, which proves nothing about its content."""
    cause = error.__cause__
    return isinstance(cause, OSError) and not missing(cause)


def missing(error: OSError) -> bool:
    """Return True for a file that is not there, or is no regular file (EINVAL of ``FileSystem.open``)."""
    return error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EINVAL)


def vanished(error: OSError) -> bool:
    """Whether a network file system may still be catching up with another node (NFS: close-to-open)."""
    return error.errno in (errno.ENOENT, errno.ESTALE)


def occupied(error: OSError) -> bool:
    """Whether rename(2) refused because the target exists; file systems differ in which they say."""
    return error.errno in (errno.ENOTEMPTY, errno.EEXIST)


def parent_of(path: Path) -> Path:
    """The nearest existing folder at or above ``path``, for asking about its file system."""
    while not os.path.lexists(path) and path != path.parent:
        path = path.parent
    return path
