"""Python's garbage collection, at the same steps on all ranks."""

import contextlib
import gc
from collections.abc import Iterator

_STEPS = 50
"""Steps between collections: garbage may hold tensors, and a collection takes up to 0.3 ms."""


class Collection:
    """Collects at chosen steps in the block of :func:`collecting_together`. ``every``: 0 for no change."""

    def __init__(self, every: int) -> None:
        self._every, self._frozen = every, False

    def after(self, step: int) -> None:
        """Collect if it is time; call this after each step."""
        if self._every and step % self._every == 0:
            gc.collect()
            if not self._frozen:
                # The first steps import and compile; every later collection would visit these objects.
                gc.freeze()
                self._frozen = True

    @contextlib.contextmanager
    def automatic(self) -> Iterator[None]:
        """Turn the automatic collection on in the block: a validation may take thousands of batches."""
        if not self._every:
            yield
            return
        gc.enable()
        try:
            yield
        finally:
            gc.disable()


@contextlib.contextmanager
def collecting_together(log_every: int) -> Iterator[Collection]:
    """Turn the automatic collection off in the block; the yielded object collects instead.

    The automatic collection runs at other steps on each rank, and all ranks wait for each rank. The object
    collects about every 50 steps, if possible at logged steps, and ignores objects that existed at its first
    collection, so a collection is short. If the program has turned the collection off, nothing changes.

    Source: torchtitan's ``GarbageCollection``.
    """
    if not gc.isenabled():
        yield Collection(0)
        return
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield Collection(-(-_STEPS // log_every) * log_every if log_every < _STEPS else _STEPS)
    finally:
        gc.enable()
        gc.unfreeze()
