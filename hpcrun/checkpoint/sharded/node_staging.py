"""Staging on a fast node-local disk (NVMe): a save is written there first, then copied to the shared disk.

The staged file has no name: however the process ends, the kernel frees the space, and no cleanup is needed.
Every block is hashed when it is written and again when it is read, so that the shared disk receives exactly
the bytes of the snapshot.
"""

import contextlib
import errno
import mmap
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import xxhash

from hpcrun.checkpoint.sharded.fork_safety import close_in_children
from hpcrun.checkpoint.storage.errors import CheckpointError, amount, explained
from hpcrun.checkpoint.storage.filesystem import LOCAL, FileSystem

_BLOCK = 8 << 20
_SECTOR = 4096


class Stage:
    """The stage folder. ``fs``: the system calls; tests inject faults here."""

    def __init__(self, folder: Path, fs: FileSystem = LOCAL) -> None:
        self.folder = folder
        self._fs = fs

    def put(
        self, size: int, image: memoryview | None, views: Callable[[], Iterable[memoryview]]
    ) -> "Stored":
        """Write ``size`` bytes: ``image``, or if it is None the concatenated ``views``.

        Raises:
            CheckpointError: the folder cannot hold the save; nothing is left behind.
        """
        with explained("hold the save (checkpoint.stage_dir)", self.folder):
            free = self._fs.free(self.folder)
            if free < size:
                raise CheckpointError(
                    f"{self.folder}: cannot hold the save (checkpoint.stage_dir): it needs "
                    f"{amount(size)}, but {amount(free)} are free"
                )
            stored = Stored(self._fs, self.folder, self._create(), size)
            try:
                hashes: list[str] = []
                if image is None:
                    blocks = _gathered(_hashed(views(), hashes))
                else:
                    hashes += [xxhash.xxh3_128_hexdigest(view) for view in views()]
                    blocks = _cut(image)
                stored.sums = tuple(self._write(stored.descriptor, block) for block in blocks)
                stored.hashes = tuple(hashes)
            except BaseException:
                stored.close()
                raise
        return stored

    def _create(self) -> int:
        try:
            return self._fs.create_unnamed(self.folder, True)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return self._fs.create_unnamed(self.folder, False)

    def _write(self, descriptor: int, block: memoryview) -> bytes:
        left = block
        while left:
            count = self._fs.write(descriptor, left)
            if count <= 0:
                raise OSError(f"the file system took {count} of {len(left)} bytes")
            left = left[count:]
        return xxhash.xxh3_128_digest(block)


class Stored:
    """A staged file. ``hashes`` are the hashes of the views, ``sums`` those of the blocks.

    Close the object to free the space; forked children do not keep the file open.
    """

    def __init__(self, fs: FileSystem, folder: Path, descriptor: int, size: int) -> None:
        self._fs, self._folder = fs, folder
        self.descriptor, self.size = descriptor, size
        self.sums: tuple[bytes, ...] = ()
        self.hashes: tuple[str, ...] = ()
        close_in_children(self)

    def blocks(self) -> Iterator[memoryview]:
        """Yield the content in blocks; each block reuses the same memory.

        Raises:
            CheckpointError: the file cannot be read, or its content has changed.
        """
        memory = memoryview(mmap.mmap(-1, _BLOCK))
        with explained("be read (checkpoint.stage_dir)", self._folder):
            for number, known in enumerate(self.sums):
                start = number * _BLOCK
                length = min(_BLOCK, self.size - start)
                block = memory[: _whole_sectors(length)]
                done = 0
                while done < len(block):
                    count = self._fs.read_into(self.descriptor, block[done:], start + done)
                    if count == 0:
                        break
                    done += count
                if xxhash.xxh3_128_digest(block[:done]) != known:
                    raise CheckpointError(
                        f"{self._folder}: the staged save (checkpoint.stage_dir) reads back with other "
                        "content; choose another folder, or unset the key"
                    )
                yield block[:length]

    def close(self) -> None:
        """Free the space."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            _close(self._fs, descriptor)


def _close(fs: FileSystem, descriptor: int) -> None:
    # The file is no longer needed, so a failed late write does not matter.
    with contextlib.suppress(OSError):
        fs.close(descriptor)


def _whole_sectors(length: int) -> int:
    return -(-length // _SECTOR) * _SECTOR


def _cut(image: memoryview) -> Iterator[memoryview]:
    """Yield ``image`` in blocks; the last block is padded to whole sectors."""
    whole = len(image) // _BLOCK * _BLOCK
    for start in range(0, whole, _BLOCK):
        yield image[start : start + _BLOCK]
    yield from _gathered([image[whole:]])


def _gathered(views: Iterable[memoryview]) -> Iterator[memoryview]:
    """Yield the bytes of all views in aligned blocks that reuse memory; the last block is padded."""
    memory = memoryview(mmap.mmap(-1, _BLOCK))
    filled = 0
    for view in views:
        while view:
            taken = min(len(view), _BLOCK - filled)
            memory[filled : filled + taken] = view[:taken]
            filled, view = filled + taken, view[taken:]
            if filled == _BLOCK:
                yield memory
                filled = 0
    if filled:
        end = _whole_sectors(filled)
        memory[filled:end] = bytes(end - filled)
        yield memory[:end]


def _hashed(views: Iterable[memoryview], hashes: list[str]) -> Iterator[memoryview]:
    for view in views:
        hashes.append(xxhash.xxh3_128_hexdigest(view))
        yield view
