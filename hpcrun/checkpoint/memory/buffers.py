"""Two snapshot buffers in memory files: one holds the last complete snapshot, the other takes the next.

The buffers are the staging memory of the saves, so a copy in memory costs one more buffer and no copying.
"""

import mmap
import os
import weakref
from collections.abc import Callable

import torch

from hpcrun.checkpoint.sharded.host_staging import Staging
from hpcrun.devices.host_memory import available_memory
from hpcrun.run.memory_keeper import new_file
from hpcrun.storage.errors import CheckpointError, amount

_PART = 4
"""Copies may take a quarter of the available memory, divided by the ranks of the host."""


class _FileBuffer(Staging):
    """A buffer in a memory file, which another process can read through ``descriptor``."""

    descriptor = -1

    def _allocate(self, size: int) -> torch.Tensor:
        buffer = super()._allocate(size)
        weakref.finalize(buffer, os.close, self.descriptor)
        return buffer

    def _map(self, size: int) -> mmap.mmap:
        self.descriptor = new_file("snapshot")
        os.ftruncate(self.descriptor, size)
        return mmap.mmap(self.descriptor, size)


class KeptBuffers(Staging):
    """The staging memory of saves that stay in memory.

    Args:
        release: drops the copy that is in the memory of this rank; called before its buffer is used again.
        like: the settings of each of the two buffers.

    Attributes:
        refused: why there are no copies any more; None: there are.
    """

    def __init__(self, release: Callable[[], None], like: Staging) -> None:
        super().__init__(
            limit=like._limit, ranks_on_host=like.ranks_on_host, pinned=like.pinned, pin=like._pin
        )
        self._release = release
        self._filled, self._next = self._new(), self._new()
        self._kept = False
        self.refused: str | None = None

    @property
    def descriptor(self) -> int:
        """The memory file of the buffer that was filled last."""
        return self._filled.descriptor

    @property
    def size(self) -> int:
        """Size of both buffers in bytes."""
        return self._filled.size + self._next.size

    def fits(self, size: int) -> bool:
        """Return True if ``size`` bytes are within the limit of a snapshot.

        Copies end here if two snapshots exceed the memory: saves then use one buffer.
        """
        if self._kept and size > self._next.size:
            try:
                self.require_room(size)
            except CheckpointError as error:
                self.end(str(error))
        return (self._next if self._kept else self._filled).fits(size)

    def budget(self) -> int:
        """Return the current limit of a snapshot in bytes."""
        return self._filled.budget()

    def reserve(self, size: int) -> torch.Tensor:
        """Return a buffer without a kept copy, as :meth:`Staging.reserve`."""
        if self._kept:
            self._filled, self._next, self._kept = self._next, self._filled, False
        return self._filled.reserve(size)

    def keep(self) -> None:
        """Keep the content of the buffer that was filled last until a later snapshot is kept."""
        self._kept = self.refused is None

    def end(self, reason: str) -> None:
        """End the copies, and free the memory of the second buffer."""
        self.refused = self.refused or reason
        self._release()
        self._next, self._kept = self._new(), False

    def require_room(self, size: int) -> None:
        """Raise CheckpointError unless copies may take further ``size`` bytes of memory on this rank."""
        free = available_memory() // self.ranks_on_host
        room = free // _PART if self._limit is None else free
        if size > room:
            raise CheckpointError(
                f"a further copy of {amount(size)} exceeds {amount(room)}, the part of the free memory that "
                "copies may take; give the job more memory, or set checkpoint.host_memory"
            )

    def _new(self) -> _FileBuffer:
        return _FileBuffer(
            limit=self._limit,
            ranks_on_host=self.ranks_on_host,
            pinned=self.pinned,
            pin=self._pin,
        )
