"""Second check on rank 0 of files that another rank reports as damaged.

The page cache or the memory of a single node may be wrong. A checkpoint that only one node cannot read is
valid, and a fallback would lose its progress.
"""

from collections.abc import Iterable

import xxhash

from hpcrun.checkpoint.storage.disk import BLOCK
from hpcrun.checkpoint.storage.errors import DamagedCheckpoint
from hpcrun.checkpoint.storage.index import INDEX, Place, decode, places
from hpcrun.checkpoint.storage.manifest import MANIFEST
from hpcrun.checkpoint.storage.store import CheckpointStore


def require_whole(store: CheckpointStore, step: int, names: Iterable[str]) -> None:
    """Read the files ``names`` of ``step`` again, from the disk where the kernel allows; for rank 0.

    Raises:
        DamagedCheckpoint: a file is damaged (``store`` then records it as proven), or the file system
            refuses to read it.
    """
    try:
        for name in (MANIFEST, INDEX, *names):
            store.drop_cache(step, name)
        store.inspect(step)
        by_file: dict[str, list[Place]] = {}
        for place in places(decode(store.read(step, INDEX))):
            by_file.setdefault(place.file, []).append(place)
        for name in names:
            _read(store, step, name, by_file.get(name, []))
    except DamagedCheckpoint as damage:
        if damage.lasting:
            store.prove(step)
        raise


def _read(store: CheckpointStore, step: int, name: str, parts: Iterable[Place]) -> None:
    """Compare the parts of a file with their hashes, as a restore does."""
    memory = memoryview(bytearray(BLOCK))
    if name in (MANIFEST, INDEX):
        return
    with store.opened(step, name) as file:
        for place in sorted(parts, key=lambda each: each.position):
            content = xxhash.xxh3_128()
            for start in range(0, place.length, BLOCK):
                view = memory[: min(BLOCK, place.length - start)]
                for block in file.fill(place.position + start, view, BLOCK):
                    content.update(block)
            if content.hexdigest() != place.xxh3:
                raise store.changed(step, name)
