"""The files in the memory of all nodes, as one file system that the checkpoint store reads."""

import errno
import itertools
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcrun.checkpoint.memory.peers import PeerAddress, PeerFile, size_of
from hpcrun.checkpoint.storage.disk import FileSystem
from hpcrun.checkpoint.storage.manifest import MANIFEST, step_name
from hpcrun.run.memory_keeper import KeeperClient, MemoryFile

_FIRST_REMOTE = 1 << 30
"""Number of the first descriptor of a remote file; the kernel's numbers are smaller."""


@dataclass(frozen=True)
class NodeMemory:
    """The memory of one node, as one of its ranks reports it.

    Attributes:
        keeper: the key of the node's keeper.
        files: the files that the keeper has.
        address: the address of the rank.
    """

    keeper: str
    files: tuple[MemoryFile, ...]
    address: PeerAddress | None


class MemoryFiles(FileSystem):
    """Reads the newest snapshot of each step. Files of this node come from its keeper, others over TCP.

    Args:
        client: the keeper of this node.
        rank: this rank; it spreads the connections over the ranks of a node.
        everyone: the reports of all ranks.
    """

    def __init__(self, client: KeeperClient, rank: int, everyone: Sequence[NodeMemory]) -> None:
        self._client, self._rank = client, rank
        self.snapshots = _choose(everyone)
        self._places: dict[tuple[str, str], tuple[MemoryFile, list[NodeMemory]]] = {}
        for report in everyone:
            for file in report.files:
                if self.snapshots.get(file.step) == file.snapshot:
                    key = step_name(file.step), file.name
                    self._places.setdefault(key, (file, []))[1].append(report)
        self._numbers = itertools.count(_FIRST_REMOTE)
        self._remote: dict[int, PeerFile] = {}
        self._local: dict[int, MemoryFile] = {}

    def names(self, path: Path) -> list[str]:
        """Return the names of the steps, whatever ``path`` is."""
        return [step_name(step) for step in sorted(self.snapshots)]

    def open(self, path: Path) -> int:
        """Open a file for reading, and return a number for it."""
        found = self._places.get((path.parent.name, path.name))
        if found is None:
            raise FileNotFoundError(errno.ENOENT, "not in the memory of a node", str(path))
        file, reports = found
        if any(report.keeper == self._client.key for report in reports):
            descriptor = self._client.open(file)
            self._local[descriptor] = file
            return descriptor
        addresses = [report.address for report in reports if report.address is not None]
        if not addresses:
            raise FileNotFoundError(errno.ENOENT, "no rank serves it", str(path))
        address = addresses[self._rank % len(addresses)]
        opened = PeerFile(address, self._client.secret, file)
        number = next(self._numbers)
        self._remote[number] = opened
        return number

    def size(self, descriptor: int) -> int:
        """Return the size of the content in bytes."""
        if descriptor in self._remote:
            return self._remote[descriptor].size
        return size_of(descriptor, self._local[descriptor])

    def read_into(self, descriptor: int, view: memoryview, position: int) -> int:
        """Read from ``position`` into ``view``; return the number of bytes, 0 at the end."""
        if descriptor in self._remote:
            return self._remote[descriptor].read_into(view, position)
        left = max(0, self.size(descriptor) - position)
        return os.preadv(descriptor, [view[:left]], position) if left else 0

    def drop_cache(self, descriptor: int) -> None:
        """Do nothing: memory has no cache."""

    def close(self, descriptor: int) -> None:
        """Close the file."""
        if descriptor in self._remote:
            self._remote.pop(descriptor).close()
            return
        self._local.pop(descriptor)
        os.close(descriptor)


def _choose(everyone: Iterable[NodeMemory]) -> dict[int, str]:
    """Return for each step the snapshot with a manifest that has the most files.

    A step has two snapshots if an attempt took it and was killed before the nodes had dropped the older one.
    """
    names: dict[tuple[int, str], set[str]] = {}
    for report in everyone:
        for file in report.files:
            names.setdefault((file.step, file.snapshot), set()).add(file.name)
    found: dict[int, str] = {}
    for (step, snapshot), files in sorted(names.items(), key=lambda each: (len(each[1]), each[0])):
        if MANIFEST in files:
            found[step] = snapshot
    return found
