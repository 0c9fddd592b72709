"""Make files of a task durable; a task does not use the run's files."""

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Write a file or the names in a folder to the disk (fsync(2)). Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
