"""An asynchronous line log: a thread appends the lines to a file."""

import errno
import os
import threading
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpcrun.run.io.files import HeldFolder, append_lines, json_line

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
