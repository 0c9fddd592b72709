"""Host memory for snapshots: training waits only for the copy into it.

New memory costs several times the copy (the kernel zeroes every page on first touch), so each rank keeps one
buffer and reuses it. The buffer has the layout of the file, page-aligned, so that direct I/O can write it
without the page cache.
"""

import mmap
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from hpcrun.checkpoint.sharded.plan import TensorChunk
from hpcrun.devices import accelerator, vendor
from hpcrun.devices.host_memory import available_memory
from hpcrun.printing import say_aside

_PAGE = 1 << 21

Pin = Callable[[int, int], Callable[[], object] | None]
"""Function that locks the pages of (address, bytes); returns the unlock function, or None on failure."""


def pin(address: int, size: int) -> Callable[[], object] | None:
    """Lock pages for the GPUs. If the pages cannot be locked, print a note; copies are then slower."""
    unlock, reason = vendor.lock_pages(address, size)
    if reason:
        say_aside(
            f"hpcrun: {size / 1e9:.1f} GB of host memory cannot be page-locked ({reason}); "
            "snapshots take longer"
        )
    return unlock


class Staging:
    """A reused buffer.

    Args:
        limit: maximum size in bytes; None: half of the machine's available memory, divided by
            ``ranks_on_host``.
        ranks_on_host: number of ranks that share this host.
        pinned: use page-locked memory, to which GPUs copy at full speed and asynchronously.
        pin: function that locks the pages of a buffer.
    """

    def __init__(
        self,
        *,
        limit: int | None = None,
        ranks_on_host: int = 1,
        pinned: bool = False,
        pin: Pin = pin,
    ) -> None:
        self._limit = limit
        self.ranks_on_host = ranks_on_host
        self.pinned = pinned
        self._pin = pin
        self._unpin: Callable[[], object] | None = None
        self._buffer: torch.Tensor | None = None

    @property
    def size(self) -> int:
        """Size of the buffer in bytes."""
        return 0 if self._buffer is None else self._buffer.numel()

    def fits(self, size: int) -> bool:
        """Return True if ``size`` bytes are within the limit."""
        return size <= self.size or size <= self.budget()

    def budget(self) -> int:
        """Return the current limit of the buffer in bytes."""
        if self._limit is not None:
            return self._limit
        return self.size + available_memory() // (2 * self.ranks_on_host)

    def reserve(self, size: int) -> torch.Tensor:
        """Return a buffer of at least ``size`` bytes, shape (n,), uint8; growing loses the old content."""
        if self._buffer is None or self._buffer.numel() < size:
            if self._unpin is not None:
                self._unpin()
            # Free the old buffer before allocating the new one.
            self._buffer = self._unpin = None
            self._buffer = self._allocate(max(1, -(-size // _PAGE)) * _PAGE)
        return self._buffer

    def _map(self, size: int) -> mmap.mmap:
        return mmap.mmap(-1, size)

    def _allocate(self, size: int) -> torch.Tensor:
        buffer = torch.frombuffer(self._map(size), dtype=torch.uint8)
        buffer[:: mmap.PAGESIZE] = 0  # touch every page now, so that the first copy is fast
        unpin = self._pin(buffer.data_ptr(), size) if self.pinned else None
        if unpin is not None:
            # A finalizer, in case this object is dropped: unlock the pages before they are freed.
            finalizer = weakref.finalize(buffer, unpin)
            finalizer.atexit = False
            self._unpin = finalizer
        return buffer


def copy_in(
    buffer: torch.Tensor, parts: Iterable[TensorChunk], values: Iterable[torch.Tensor]
) -> None:
    """Copy each value to the position of its part in ``buffer``; return when all copies are complete."""
    devices = set()
    for part, value in zip(parts, values, strict=True):
        place = buffer[part.position : part.position + part.length]
        place.view(value.dtype).view(part.sizes).copy_(value.detach(), non_blocking=True)
        if accelerator.is_accelerator(value.device):
            devices.add(value.device)
    for device in devices:  # not only the current device
        accelerator.synchronize_stream(device)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor without a copy."""
    if not tensor.numel():
        return memoryview(b"")
    array: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)
