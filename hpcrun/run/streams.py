"""Output that outlives a full disk: lines of the log are lost, and not the training or the requeue."""

import errno
import io
import os
import sys
from typing import Any

_FULL = (errno.ENOSPC, errno.EDQUOT)


class _Forgiving(io.RawIOBase):
    """A descriptor whose writes are dropped while the disk is full."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor

    def fileno(self) -> int:
        """The descriptor, for child processes."""
        return self._descriptor

    def writable(self) -> bool:
        """It is."""
        return True

    def isatty(self) -> bool:
        """As the descriptor."""
        return os.isatty(self._descriptor)

    def write(self, data: Any) -> int:
        """Write ``data``, or drop it; raises OSError for other trouble than space."""
        try:
            return os.write(self._descriptor, data)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            return len(data)


def outlive_full_disk() -> None:
    """Put such streams in the place of ``sys.stdout`` and ``sys.stderr``."""
    sys.stdout = _text(1)
    sys.stderr = _text(2)


def _text(descriptor: int) -> io.TextIOWrapper:
    return io.TextIOWrapper(
        io.BufferedWriter(_Forgiving(descriptor)),
        encoding="utf-8",
        errors="backslashreplace",
        line_buffering=True,
        write_through=True,
    )
