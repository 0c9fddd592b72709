"""The host memory that a snapshot is copied into: the only thing that training waits for.

Fresh memory costs several times the copy itself (the kernel zeroes every page on first touch), so one
buffer per rank is kept and used again. It holds the file exactly as it will lie on disk, page-aligned,
so that it can go out by direct I/O without passing through the page cache.
"""

import contextlib
import mmap
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from hpcrun.checkpoint.host_memory import available_memory
from hpcrun.checkpoint.sharded.plan import Part
from hpcrun.printing import say_aside

_PAGE = 1 << 21
_PORTABLE = 1  # cudaHostRegisterPortable: for all devices

Pin = Callable[[int, int], Callable[[], None] | None]
"""Locks the pages of (address, bytes) and returns what unlocks them, or None where they stay as they are."""


def pin_for_cuda(address: int, size: int) -> Callable[[], None] | None:
    """Lock pages for CUDA (or HIP); where the driver refuses, say so, and copies are slower.

    torch's own allocator of page-locked memory rounds up to a power of two and keeps every block.
    """
    cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = int(cudart.cudaHostRegister(address, size, _PORTABLE))
    if code:
        say_aside(
            f"hpcrun: {size / 1e9:.1f} GB of host memory cannot be page-locked (CUDA error {code}); "
            "snapshots take longer"
        )
        return None
    return lambda: cudart.cudaHostUnregister(address)


class Staging:
    """One reused buffer.

    Args:
        limit: bytes that it may take; None: half of what the machine has available when it is made,
            shared by ``ranks_on_host`` ranks.
        pinned: page-locked memory, to which CUDA copies at full speed and beside the computation.
        pin: locks the pages of a buffer.
    """

    def __init__(
        self,
        *,
        limit: int | None = None,
        ranks_on_host: int = 1,
        pinned: bool = False,
        pin: Pin = pin_for_cuda,
    ) -> None:
        self._limit = limit
        self._ranks_on_host = ranks_on_host
        self._pinned = pinned
        self._pin = pin
        self._unpin: Callable[[], object] | None = None
        self._buffer: torch.Tensor | None = None
        self._pages: mmap.mmap | None = None

    @property
    def size(self) -> int:
        """Bytes held now."""
        return 0 if self._buffer is None else self._buffer.numel()

    def fits(self, size: int) -> bool:
        """Whether ``size`` bytes are within the limit."""
        return size <= self.size or size <= self.budget()

    def budget(self) -> int:
        """Bytes that the buffer may take at present."""
        if self._limit is not None:
            return self._limit
        return self.size + available_memory() // (2 * self._ranks_on_host)

    def reserve(self, size: int) -> torch.Tensor:
        """A buffer of at least ``size`` bytes, shape (n,), uint8; its old content is lost if it grows."""
        if self._buffer is None or self._buffer.numel() < size:
            if self._unpin is not None:
                self._unpin()
            self._buffer = self._pages = self._unpin = None  # the old one goes before the new comes
            self._buffer = self._allocate(max(1, -(-size // _PAGE)) * _PAGE)
        return self._buffer

    def offer(self) -> None:
        """Let the system take the memory if it needs it before the next :meth:`reserve`; the content is lost.

        What it does not need stays, and costs nothing to use again. Page-locked memory is kept.
        """
        if self._pages is not None and self._unpin is None:
            with contextlib.suppress(OSError):
                self._pages.madvise(mmap.MADV_FREE)

    def _allocate(self, size: int) -> torch.Tensor:
        memory = mmap.mmap(-1, size)
        self._pages = memory
        with contextlib.suppress(OSError):  # a kernel without transparent huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        buffer = torch.frombuffer(memory, dtype=torch.uint8)
        buffer[:: mmap.PAGESIZE] = 0  # every page is there before the first copy is timed
        unpin = self._pin(buffer.data_ptr(), size) if self._pinned else None
        if unpin is not None:
            # Also where this object is dropped: the buffer goes before its pages do.
            finalizer = weakref.finalize(buffer, unpin)
            finalizer.atexit = False
            self._unpin = finalizer
        return buffer


def copy_in(buffer: torch.Tensor, parts: Iterable[Part], values: Iterable[torch.Tensor]) -> None:
    """Copy each value to its part's place in ``buffer``, and return when all are there."""
    devices = set()
    for part, value in zip(parts, values, strict=True):
        place = buffer[part.position : part.position + part.length]
        place.view(value.dtype).view(part.sizes).copy_(value.detach(), non_blocking=True)
        if value.is_cuda:
            devices.add(value.device)
    for device in devices:  # which need not be the current one
        torch.cuda.current_stream(device).synchronize()


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU, not copied."""
    if not tensor.numel():
        return memoryview(b"")
    array: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)
