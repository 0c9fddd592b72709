"""Keep the last snapshot in the memory of the nodes, and restore from it after a restart in the same job.

A snapshot counts as soon as every rank's keeper has its file; only then the keepers drop the one before. A
process that is killed at any moment therefore leaves a complete snapshot, or the one before it, or both. The
name of a snapshot is the hash of its manifest, which lists the hash of every file: files of two attempts at
the same step are never mixed.

A restore uses memory only if it is not older than the newest checkpoint on disk, by step and by time, and
only if every rank can read and verify it; otherwise all ranks use the disk. A keeper that was away thus
brings back no state that a later attempt has replaced. Only attempts of one start of a job share a key.
"""

import contextlib
import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import BinaryIO

import xxhash

from hpcrun.checkpoint.memory.buffers import KeptBuffers
from hpcrun.checkpoint.memory.peers import (
    MemoryFiles,
    NodeMemory,
    PeerAddress,
    PeerFile,
    host_addresses,
    serving,
)
from hpcrun.checkpoint.outcome import Restored
from hpcrun.checkpoint.sharded import restore
from hpcrun.checkpoint.sharded.host_staging import Staging
from hpcrun.checkpoint.sharded.rank_file import file_name
from hpcrun.checkpoint.sharded.restore import Template
from hpcrun.errors import one_line
from hpcrun.ranks.collective import Ranks, first_of
from hpcrun.run.memory_keeper import KeeperClient, MemoryFile, key_here, new_file
from hpcrun.storage.errors import CheckpointError
from hpcrun.storage.index import INDEX
from hpcrun.storage.manifest import MANIFEST, decode
from hpcrun.storage.store import CheckpointStore

# Seconds for the start of the keeper of a node, which starts at the same time as the first ranks.
_KEEPER = 10.0
_BLOCK = 8 << 20
_ROOT = Path("memory of the nodes")
"""Folder of the files in messages; it is not on a disk."""


@dataclass(frozen=True)
class MemorySnapshot:
    """A snapshot that all ranks have hashed: its step and manifest, and on rank 0 the index."""

    step: int
    manifest: bytes
    index: bytes | None = None

    @property
    def name(self) -> str:
        """Name of the snapshot: the hash of the manifest."""
        return xxhash.xxh3_128_hexdigest(self.manifest)

    def file(self, name: str, size: int) -> MemoryFile:
        """Return the entry of a file."""
        return MemoryFile(self.step, self.name, name, size)


class MemoryCopies:
    """The copies of a run in memory, as one rank uses them; :func:`open_copies` makes it.

    Args:
        client: the keeper of this node.
        buffers: the staging memory of the saves.
        nodes: number of nodes with a keeper.
        peers: True to copy the files of each node to the next node.
    """

    def __init__(
        self, client: KeeperClient, buffers: KeptBuffers, *, nodes: int, peers: bool
    ) -> None:
        self._client, self.buffers = client, buffers
        self._nodes, self._peers = nodes, peers and nodes > 1
        self._hosts = host_addresses(os.environ)
        self._late: float | None = time.monotonic() + _KEEPER
        self.active = True
        """False: this attempt keeps no further snapshot. The ranks agree on it unless one of them is gone."""

    def keep(self, snapshot: MemorySnapshot, size: int, ranks: Ranks) -> str | None:
        """Keep the snapshot in the buffer that was filled last; return why that is not possible. Collective.

        After a failure on any rank the copies end on all ranks.

        Args:
            size: bytes of this rank's file; 0: the rank has none in memory.
            ranks: the ranks, with the group of the thread that saves.

        Raises:
            RuntimeError: another rank is gone (torch.distributed).
        """
        trouble: str | None = None
        mine: tuple[MemoryFile, ...] = ()
        try:
            mine = self._put(snapshot, size, ranks.rank)
        except Exception as error:  # of any type: the other ranks wait for this rank's report
            trouble = ranks.named(error)
        if self._peers:
            missed = self._fetch(snapshot, mine, ranks)
            trouble = trouble or missed
        troubles = [each for each in ranks.gather(trouble) if each]
        if troubles:
            self.end(first_of(troubles))
            return first_of(troubles)
        self.buffers.keep()
        _drop_others(self._client, snapshot.name)
        return None

    def end(self, reason: str) -> None:
        """Keep no snapshot any more, and free the memory of the copies on this node; on all ranks.

        Not after the loss of a rank: the next attempt needs the last snapshot.
        """
        self.active = False
        self.buffers.end(reason)

    def restore(
        self, store: CheckpointStore, ranks: Ranks, template: Template
    ) -> tuple[Restored | None, list[str]]:
        """Restore from memory as :func:`hpcrun.checkpoint.sharded.restore.restore`. Collective.

        Args:
            store: the checkpoints on disk.

        Returns:
            The state, or None if the disk must be used; and notes for the user.

        Raises:
            CheckpointError: the folder of checkpoints cannot be read. On all ranks.
        """
        files: list[MemoryFile] = []
        # Of any type: the other ranks wait for this rank's report.
        with contextlib.suppress(Exception):
            files = self._client.files()
        if not any(ranks.gather(len(files))):
            return None, []
        with self._serving() as address:
            everyone = ranks.gather(NodeMemory(self._client.key, tuple(files), address))
            found = MemoryFiles(self._client, ranks.rank, everyone)
            memory = CheckpointStore(_ROOT, store.owner, fs=found, patience=0)
            newest, usable = ranks.from_rank_0(lambda: _usable(memory, store))
            # -1: a skipped step, so that the text of an error does not advise to remove the folder.
            older = [-1, *(step for step in found.snapshots if step not in usable)]
            restored: Restored | None = None
            notes: list[str] = []
            try:
                restored = restore.restore(memory, ranks, template, older)
            except CheckpointError as error:
                notes = [f"the copies in memory are not used: {one_line(error)}"]
        _drop_others(self._client, "" if restored is None else found.snapshots[restored.step])
        if restored is None:
            return None, notes
        at = "none is on disk" if newest is None else f"the newest step on disk is {newest}"
        line = f"step {restored.step} was read from memory ({at})"
        restored = replace(restored, notes=(*restored.notes, line), committed=newest)
        return replace(restored, snapshot=usable[restored.step]), notes

    def _serving(self) -> contextlib.AbstractContextManager[PeerAddress | None]:
        if self._nodes == 1:
            return contextlib.nullcontext()
        return serving(self._client.secret, self._hosts, self._client.open)

    def _put(self, snapshot: MemorySnapshot, size: int, rank: int) -> tuple[MemoryFile, ...]:
        """Give this rank's files to the keeper, and return them."""
        if self.buffers.refused is not None:
            raise CheckpointError(self.buffers.refused)
        if not size:
            raise CheckpointError("the snapshot exceeds the memory budget")
        own = snapshot.file(file_name(rank), size)
        self._wait_for_keeper()
        self._client.put(own, self.buffers.descriptor)
        files = [own]
        if snapshot.index is not None:
            for name, content in ((INDEX, snapshot.index), (MANIFEST, snapshot.manifest)):
                files.append(snapshot.file(name, len(content)))
                with self._given(files[-1]) as stream:
                    stream.write(content)
        return tuple(files)

    def _wait_for_keeper(self) -> None:
        """Wait until the keeper has started. The thread of a save does this, and not the start of a rank."""
        while self._late is not None and time.monotonic() < self._late:
            try:
                self._client.files()
                self._late = None
            except ConnectionRefusedError:
                time.sleep(0.2)

    def _fetch(
        self, snapshot: MemorySnapshot, mine: Sequence[MemoryFile], ranks: Ranks
    ) -> str | None:
        """Copy files of the node before this one; return why that is not possible. Collective."""
        trouble: str | None = None
        with self._serving() as address:
            everyone = ranks.gather(NodeMemory(self._client.key, tuple(mine), address))
            try:
                for source in _sources(everyone, ranks.rank):
                    for file in source.files:
                        self._copy(snapshot, file, source)
            except Exception as error:  # as above
                trouble = ranks.named(error)
            # The server stays until every rank has its copies.
            ranks.gather(None)
        return trouble

    def _copy(self, snapshot: MemorySnapshot, file: MemoryFile, source: NodeMemory) -> None:
        """Copy a file of another node, compare it with its hash, and give it to the keeper."""
        if source.address is None:
            raise CheckpointError("a node does not serve its memory")
        self.buffers.require_room(file.size)
        manifest = decode(snapshot.manifest)
        wanted = snapshot.name if file.name == MANIFEST else manifest.record(file.name).xxh3
        content, position = xxhash.xxh3_128(), 0
        block = memoryview(bytearray(min(_BLOCK, file.size)))
        opened = PeerFile(source.address, self._client.secret, file)
        with contextlib.closing(opened), self._given(file) as stream:
            while count := opened.read_into(block[: file.size - position], position):
                content.update(block[:count])
                stream.write(block[:count])
                position += count
            if content.hexdigest() != wanted:
                raise CheckpointError(f"{file.name}: the copy for another node has another content")

    @contextlib.contextmanager
    def _given(self, file: MemoryFile) -> Iterator[BinaryIO]:
        """Yield a new file in memory, and give it to the keeper at the end of the block."""
        with os.fdopen(new_file(file.name), "wb") as stream:
            yield stream
            stream.flush()
            self._client.put(file, stream.fileno())


def _usable(memory: CheckpointStore, disk: CheckpointStore) -> tuple[int | None, dict[int, float]]:
    """Return the newest step on disk, and the times of the steps in memory that are not older than it."""
    newest, written = max(disk.steps(), default=None), 0.0
    times = dict.fromkeys(memory.steps(), math.inf)
    # A restore reports damage.
    with contextlib.suppress(CheckpointError):
        written = 0.0 if newest is None else disk.manifest(newest).created
    for step in times:
        with contextlib.suppress(CheckpointError):
            times[step] = memory.manifest(step).created
    kept = {step: at for step, at in times.items() if step >= (newest or 0) and at >= written}
    return newest, kept


def _drop_others(client: KeeperClient, snapshot: str = "") -> None:
    """Let the keeper drop all snapshots except ``snapshot``. If it has ended, the next snapshot notices."""
    # Of any type: this rank must stay with the other ranks.
    with contextlib.suppress(Exception):
        client.only(snapshot)


def _sources(everyone: Sequence[NodeMemory], rank: int) -> list[NodeMemory]:
    """Return the ranks of the previous node from which this rank copies files."""
    nodes = list(dict.fromkeys(report.keeper for report in everyone))
    if len(nodes) == 1:
        return []
    here = everyone[rank].keeper
    before = nodes[nodes.index(here) - 1]
    mates = [number for number, report in enumerate(everyone) if report.keeper == here]
    wanted = [report for report in everyone if report.keeper == before]
    return wanted[mates.index(rank) :: len(mates)]


def open_copies(
    run: str, ranks: Ranks, staging: Staging, *, peers: bool, key: str | None = None
) -> MemoryCopies | None:
    """Return the copies of ``run`` in the memory of this node; None if a rank has no key. Collective.

    Args:
        run: the path of the run, which names the copies.
        staging: the memory for a snapshot; each of the two buffers has its limit.
        peers: True to copy the files of each node to the next node.
        key: the key of the keeper of this node; None: from the environment.
    """
    client = KeeperClient(key_here(os.environ) if key is None else key, run)
    nodes = set(ranks.gather(client.key))
    if "" in nodes:
        return None
    buffers = KeptBuffers(partial(_drop_others, client), staging)
    return MemoryCopies(client, buffers, nodes=len(nodes), peers=peers)
