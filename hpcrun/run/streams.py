"""Output that survives a full or failing disk: log lines are lost, training and requeue continue."""

import contextlib
import errno
import io
import os
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO, cast

from hpcrun.printing import say_aside
from hpcrun.run.files import HeldFolder, append_lines, json_line

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


_MOST_WAITING = 1000


class LineWriter:
    """Appends JSON lines to a file as :func:`append_line`, asynchronously.

    The first line is written immediately; lines that follow are written together, ``pause`` seconds later.
    Each write opens and closes the file, because only this makes the lines visible on NFS, and it costs more
    than the lines. A killed process loses the waiting lines.
    """

    def __init__(self, path: Path, *, pause: float = 0.2) -> None:
        self._path, self._pause = path, pause
        self._folder = HeldFolder(path.parent)
        self._waiting: deque[Mapping[str, Any]] = deque()
        self._appending = threading.Lock()
        self._some, self._over = threading.Event(), threading.Event()
        self._error: Exception | None = None
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name="hpcrun-lines", daemon=True)
        self._thread.start()

    def write(self, value: Mapping[str, Any]) -> None:
        """Queue ``value`` for writing; the caller must not change it any more.

        Raises:
            OSError: the disk refused earlier lines, or this line if very many are waiting.
            TypeError, ValueError: a line is not JSON.
        """
        self._waiting.append(value)
        if len(self._waiting) > _MOST_WAITING:
            self._append()
        self._some.set()
        self._raise()

    def flush(self) -> None:
        """Wait until all lines are in the file; raises as :meth:`write` does."""
        self._append()
        self._raise()

    def close(self) -> None:
        """Flush all lines, and end the thread; raises as :meth:`write` does."""
        if self._inherited:
            return
        self._over.set()
        self._some.set()
        self._thread.join()
        self.flush()

    def _run(self) -> None:
        while not self._over.is_set():
            self._some.wait()
            self._some.clear()
            self._append()
            self._over.wait(self._pause)

    def _append(self) -> None:
        if self._inherited:
            return
        with self._appending:
            values = [self._waiting.popleft() for _ in range(len(self._waiting))]
            if not values:
                return
            try:
                if not self._folder.is_there():
                    # The run was deleted, and perhaps created again under the same name.
                    raise FileNotFoundError(errno.ENOENT, "its folder is gone", str(self._path))
                # Encode here, not in `write`: a batch takes a fifth of the time per line.
                append_lines(self._path, b"".join(map(json_line, values)))
            except Exception as error:
                # The next call of `write` or `flush` raises the error, not this thread.
                self._error = error

    @property
    def _inherited(self) -> bool:
        """True in a fork of the process, which has no thread; the lines belong to the parent."""
        return os.getpid() != self._process

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error
