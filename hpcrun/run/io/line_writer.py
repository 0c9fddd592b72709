"""A log of lines that nobody has to wait for: a thread appends them to the file."""

import errno
import os
import threading
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpcrun.run.io.files import HeldFolder, append_lines, json_line

_PAUSE = 0.2
_MOST_WAITING = 1000


class LineWriter:
    """Appends JSON lines to a file, as :func:`append_line` does, beside the thread that writes them.

    A line is in the file at once, or where another was appended just before, with all that came since
    in one go ``_PAUSE`` seconds later: opening and closing the file, without which readers elsewhere see
    nothing on NFS, costs more than the lines. A process that is killed outright loses those that wait.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._folder = HeldFolder(path.parent)
        self._waiting: deque[Mapping[str, Any]] = deque()
        self._appending = threading.Lock()
        self._some, self._over = threading.Event(), threading.Event()
        self._error: Exception | None = None
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name="hpcrun-lines", daemon=True)
        self._thread.start()

    def write(self, value: Mapping[str, Any]) -> None:
        """Have ``value`` appended, which nobody may change any more.

        Raises:
            OSError: the disk refused lines written before, or this one where very many wait.
            TypeError, ValueError: one of them is not JSON.
        """
        self._waiting.append(value)
        if len(self._waiting) > _MOST_WAITING:
            self._append()
        self._some.set()
        self._raise()

    def flush(self) -> None:
        """Return when all lines are in the file; raises as :meth:`write` does."""
        self._append()
        self._raise()

    def close(self) -> None:
        """:meth:`flush`, and end the thread."""
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
            self._over.wait(_PAUSE)

    def _append(self) -> None:
        if self._inherited:
            return
        with self._appending:
            values = [self._waiting.popleft() for _ in range(len(self._waiting))]
            if not values:
                return
            try:
                if not self._folder.is_there():
                    # Of a run that was deleted, or deleted and made anew under its name.
                    raise FileNotFoundError(errno.ENOENT, "its folder is gone", str(self._path))
                # As bytes only here: many in a row take a fifth of the time of one between two steps.
                append_lines(self._path, b"".join(map(json_line, values)))
            except Exception as error:
                # Whoever is next to write or flush hears of it, and not this thread.
                self._error = error

    @property
    def _inherited(self) -> bool:
        """Whether this is a fork of the process: it has no thread, and the lines are its parent's."""
        return os.getpid() != self._process

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error
