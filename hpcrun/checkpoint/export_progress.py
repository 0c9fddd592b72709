"""The progress of an export: the bytes that were read, and the bytes of the new files."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hpcrun.printing import Progress

# Seconds between two looks at the new files, which torch and safetensors write by themselves.
_LOOK = 0.2


class ExportProgress:
    """Counts the bytes of the groups that are read one after the other; :meth:`read` is a ``Progress``."""

    def __init__(self) -> None:
        self._before = self._group = 0

    def read(self, done: int, total: int) -> None:
        """Note that ``done`` bytes of the ``total`` of this group were read."""
        self._group = done
        if done == total:
            self._before, self._group = self._before + total, 0

    @property
    def done(self) -> int:
        """The bytes of all groups that were read."""
        return self._before + self._group

    @contextmanager
    def reported(self, progress: Progress | None, folder: Path, size: int) -> Iterator[None]:
        """Report to ``progress`` in a thread during the block.

        Args:
            folder: the folder of the new files.
            size: the bytes of the model, which is read and written.
        """
        if progress is None:
            yield
            return
        over = threading.Event()

        def report() -> None:
            while not over.wait(_LOOK):
                progress(self.done + min(_bytes_in(folder), size), 2 * size)

        thread = threading.Thread(target=report, name="export-progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def _bytes_in(folder: Path) -> int:
    """Return the bytes of all files below ``folder``; a file may disappear during the sum."""
    found = 0
    for path, _, names in os.walk(folder):
        for name in names:
            try:
                found += os.stat(f"{path}/{name}").st_size  # noqa: PTH116
            except FileNotFoundError:
                continue
    return found
