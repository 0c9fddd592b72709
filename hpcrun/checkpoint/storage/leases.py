"""Leases: a reader's lease keeps a checkpoint from being pruned during a read.

A lease is a file in the checkpoint folder; flock(2) is missing on Lustre (by default) and on old NFS. The
name contains the expiry time, so that a killed reader does not block pruning forever.
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
"""Seconds. Longer than a read takes, and longer than the clocks of a cluster differ."""

_HOLD = re.compile(r"\.held-(\d{9,})-(\d+)-[A-Za-z0-9._-]+")


@contextmanager
def hold(root: Path, step: int, fs: FileSystem = LOCAL) -> Iterator[None]:
    """Protect ``step`` from pruning during the block, for at most an hour.

    A reader without write permission gets no lease, and reads anyway.
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


def held(names: Iterable[str]) -> set[int]:
    """Return the steps with a valid lease among these file names."""
    now = time.time()
    found = (_HOLD.fullmatch(name) for name in names)
    return {int(match[1]) for match in found if match and int(match[2]) > now}


def expired(names: Iterable[str]) -> list[str]:
    """Return the names of expired leases; the margin allows for clocks that differ."""
    now = time.time()
    found = ((name, _HOLD.fullmatch(name)) for name in names)
    return [name for name, match in found if match and int(match[2]) + LEASE < now]
