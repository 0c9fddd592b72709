"""A fast folder of this node (NVMe) that a save goes to first, and from where it drains to the shared disk.

The file there never has a name: however the process ends, the kernel takes the space back, and there is
nothing to sweep. Every block is hashed as it goes in and again as it comes out, so that what is
committed on the shared disk is what was taken from training.
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
    """The folder. ``fs``: the system calls; tests plant faults there."""

    def __init__(self, folder: Path, fs: FileSystem = LOCAL) -> None:
        self.folder = folder
        self._fs = fs

    def put(
        self, size: int, image: memoryview | None, views: Callable[[], Iterable[memoryview]]
    ) -> "Stored":
        """Write ``size`` bytes: ``image``, or where that is None what ``views`` gives one after the other.

        Raises:
            CheckpointError: the folder cannot take it. Nothing of it stays.
        """
        with explained("hold the save (checkpoint.stage_dir)", self.folder):
            free = self._fs.free(self.folder)
            if free < size:
                raise CheckpointError(
                    f"{self.folder}: cannot hold the save (checkpoint.stage_dir): it needs "
                    f"{amount(size)}, {amount(free)} are free"
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
    """What :meth:`Stage.put` writes; ``hashes`` are those of the views, ``sums`` those of the blocks.

    Close it to free the space, which no child that is forked meanwhile keeps.
    """

    def __init__(self, fs: FileSystem, folder: Path, descriptor: int, size: int) -> None:
        self._fs, self._folder = fs, folder
        self.descriptor, self.size = descriptor, size
        self.sums: tuple[bytes, ...] = ()
        self.hashes: tuple[str, ...] = ()
        close_in_children(self)

    def blocks(self) -> Iterator[memoryview]:
        """The content, a block at a time in memory that is used again for the next.

        Raises:
            CheckpointError: it cannot be read, or is not what was written.
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
                        f"{self._folder}: what was saved there (checkpoint.stage_dir) is not what "
                        "comes back; choose another folder, or none"
                    )
                yield block[:length]

    def close(self) -> None:
        """Free the space."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            _close(self._fs, descriptor)


def _close(fs: FileSystem, descriptor: int) -> None:
    # Nothing of the file is wanted any more, so that no failure to write it matters.
    with contextlib.suppress(OSError):
        fs.close(descriptor)


def _whole_sectors(length: int) -> int:
    return -(-length // _SECTOR) * _SECTOR


def _cut(image: memoryview) -> Iterator[memoryview]:
    """``image`` in blocks, the last filled up to whole sectors."""
    whole = len(image) // _BLOCK * _BLOCK
    for start in range(0, whole, _BLOCK):
        yield image[start : start + _BLOCK]
    yield from _gathered([image[whole:]])


def _gathered(views: Iterable[memoryview]) -> Iterator[memoryview]:
    """The bytes of all views in blocks, aligned, in memory that is used again; the last filled up."""
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
