"""A count of the bytes that several threads have read."""

import threading
from typing import Any

from hpcrun.printing import Progress


class ByteCounter:
    """Counts bytes for ``progress``; as a context, it ends the threads after an exception such as Ctrl-C.

    Args:
        progress: called with the bytes so far, and ``total``.
    """

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress, self._total = progress, total
        self._done, self._lock = 0, threading.Lock()
        self._stopped = False

    def add(self, size: int) -> None:
        """Count ``size`` bytes.

        Raises:
            RuntimeError: the context has ended with an exception, so the thread has to end.
        """
        with self._lock:
            if self._stopped:
                raise RuntimeError("the reading was stopped")
            self._done += size
            self._progress(self._done, self._total)

    def __enter__(self) -> "ByteCounter":
        return self

    def __exit__(self, kind: object, *_: Any) -> None:
        if kind is not None:
            with self._lock:
                self._stopped = True
