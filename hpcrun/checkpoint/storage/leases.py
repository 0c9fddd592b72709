"""A reader's mark on a checkpoint, so that nobody prunes it while it is read.

A file of a telling name beside the checkpoints: a lock would need flock(2), which Lustre and old NFS lack.
It carries the time until which it counts, so that a reader that was killed holds nothing for ever.
"""

import os
import re
import secrets
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hpcrun.checkpoint.storage.filesystem import LOCAL, FileSystem

LEASE = 3600.0
"""Seconds. Longer than clocks of one cluster differ, and than reading a checkpoint takes."""

_HOLD = re.compile(r"\.held-(\d{9,})-(\d+)-[A-Za-z0-9._-]+")


@contextmanager
def hold(root: Path, step: int, fs: FileSystem = LOCAL) -> Iterator[None]:
    """Keep ``step`` from being pruned during the block, an hour at most.

    Who may not write there cannot hold anything, and reads all the same.
    """
    until = int(time.time() + LEASE)
    host = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname())
    name = f".held-{step:09d}-{until}-{host}-{os.getpid()}-{secrets.token_hex(4)}"
    made = False
    with suppress(OSError):
        fs.close(fs.create(root / name))
        made = True
    try:
        yield
    finally:
        if made:
            with suppress(OSError):
                fs.unlink(root / name)


def held(names: Iterable[str], now: float | None = None) -> set[int]:
    """The steps that files of these names hold."""
    now = time.time() if now is None else now
    found = (_HOLD.fullmatch(name) for name in names)
    return {int(match[1]) for match in found if match and int(match[2]) > now}


def expired(names: Iterable[str], now: float | None = None) -> list[str]:
    """The names of holds that count no more, long enough for any clock."""
    now = time.time() if now is None else now
    found = ((name, _HOLD.fullmatch(name)) for name in names)
    return [name for name, match in found if match and int(match[2]) + LEASE < now]
