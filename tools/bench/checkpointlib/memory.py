"""Restores from the memory of the node, compared with restores from disk of the same step."""

import time
from collections.abc import Callable
from pathlib import Path

from hpcrun.checkpoint.memory.copies import open_copies
from hpcrun.checkpoint.sharded.engine import CheckpointEngine
from hpcrun.checkpoint.sharded.host_staging import Staging
from hpcrun.ranks.collective import Ranks
from hpcrun.run.memory_keeper import new_key, start
from hpcrun.storage.store import CheckpointStore

FILES = ("manifest.json", "index.json", "rank-00000.bin")


class MemoryRestores:
    """One step, in memory and on disk. ``save`` saves the state as step 1 with the engine that it gets."""

    def __init__(self, folder: Path, save: Callable[[CheckpointEngine], None]) -> None:
        self._folder, self._key = folder, new_key()
        self._keeper = start(self._key)
        save(self._engine(self._key))

    def seconds(self, load: Callable[[CheckpointEngine], None]) -> tuple[float, float]:
        """Return the seconds of a restore from memory, and of one from disk without the cache of the node."""
        found = []
        for key in (self._key, ""):
            engine = self._engine(key)
            for name in FILES:
                engine.store.drop_cache(1, name)
            began = time.perf_counter()
            load(engine)
            found.append(time.perf_counter() - began)
        return found[0], found[1]

    def close(self) -> None:
        """End the keeper, which frees the memory."""
        self._keeper.kill()
        self._keeper.communicate()

    def _engine(self, key: str) -> CheckpointEngine:
        memory = open_copies("bench", Ranks(), Staging(), peers=False, key=key)
        store = CheckpointStore(self._folder, "1-0")
        return CheckpointEngine(
            store, Ranks(), still_mine=lambda: None, after_commit=lambda _: None, memory=memory
        )
