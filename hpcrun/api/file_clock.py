"""The age of files by the clock of their file server.

A login node's clock may differ from those of the compute nodes by an hour. The differences between
times of modification do not depend on them: the file server sets these times (RFC 8881, 5.8.2.43).
"""

import contextlib
import os
import tempfile
import time
from pathlib import Path

# Seconds. A file of this age proves that the clocks agree well enough.
_CREDIBLE = 60.0


class FileClock:
    """The clocks of the file servers; each is read at most once, and only if a file's age is in doubt."""

    def __init__(self) -> None:
        # Seconds by which this machine's clock is ahead, by device.
        self._ahead: dict[int, float] = {}

    def age(self, path: Path) -> float | None:
        """Return the seconds since ``path`` was written; None without the file."""
        try:
            found = path.stat()
        except OSError:
            return None
        return self.since(found.st_mtime, path.parent)

    def since(self, modified: float, folder: Path) -> float:
        """Return the seconds since a file of ``folder`` was ``modified`` (Unix seconds)."""
        age = time.time() - modified
        if not 0 <= age <= _CREDIBLE:
            device = folder.stat().st_dev
            if device not in self._ahead:
                self._ahead[device] = _ahead_of(folder)
            age -= self._ahead[device]
        return max(0.0, age)


def _ahead_of(folder: Path) -> float:
    """Return the seconds by which this machine's clock is ahead; 0 where this user may not write."""
    with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=folder, buffering=0) as probe:
        probe.write(b"\n")
        return time.time() - os.fstat(probe.fileno()).st_mtime
    return 0.0
