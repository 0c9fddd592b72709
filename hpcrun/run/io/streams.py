"""Output that survives a full or failing disk: log lines are lost, training and requeue continue."""

import contextlib
import errno
import io
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO, cast

from hpcrun.printing import say_aside

_LOST = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.ESTALE)


class _DroppingWrites(io.RawIOBase):
    """A descriptor whose writes are dropped while the disk is full or fails."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor

    def fileno(self) -> int:
        """Return the descriptor, for child processes."""
        return self._descriptor

    def writable(self) -> bool:
        """Return True."""
        return True

    def isatty(self) -> bool:
        """Return True if the descriptor is a terminal."""
        return os.isatty(self._descriptor)

    def write(self, data: Any) -> int:
        """Write ``data``, or drop it if the disk fails; raises OSError for other errors."""
        try:
            return os.write(self._descriptor, data)
        except OSError as error:
            if error.errno not in _LOST:
                raise
            return len(data)


def outlive_full_disk() -> None:
    """Replace ``sys.stdout`` and ``sys.stderr`` by streams that drop writes on a full disk."""
    sys.stdout = _text(1)
    sys.stderr = _text(2)


def _text(descriptor: int) -> io.TextIOWrapper:
    return io.TextIOWrapper(
        io.BufferedWriter(_DroppingWrites(descriptor)),
        encoding="utf-8",
        errors="backslashreplace",
        line_buffering=True,
        write_through=True,
    )


class _Copying:
    """A stream that also writes its text to a log; all other attributes are those of the stream."""

    def __init__(self, stream: TextIO, log: TextIO) -> None:
        self._stream, self._log = stream, log

    def write(self, text: str) -> int:
        """Write ``text`` to the stream and to the log."""
        self._log.write(text)
        return self._stream.write(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write all ``lines`` to the stream and to the log."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def copied_to(path: Path) -> Iterator[None]:
    """Append all output of Python code in the block to ``path``, in addition to the terminal.

    Child processes and native code print only to the terminal. If the log cannot be opened, a line reports
    the error.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    except OSError as error:
        say_aside(f"hpcrun: {path}: cannot be written, so this log is lost: {error.strerror}")
        yield
        return
    streams = sys.stdout, sys.stderr
    # The log stays open: a logger may keep a stream of the block, and print at the end of the process.
    log = _text(descriptor)
    sys.stdout, sys.stderr = (cast(TextIO, _Copying(stream, log)) for stream in streams)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams
