"""Python's garbage collection, at the same steps on all ranks."""

import contextlib
import gc
from collections.abc import Callable, Iterator

_MOST_STEPS = 50
"""Steps without a collection; garbage may hold tensors."""


@contextlib.contextmanager
def collecting_together(log_every: int) -> Iterator[Callable[[int], None]]:
    """Turn the automatic collection off in the block; yield a function to call after each step.

    The automatic collection runs at other steps on each rank, and all ranks wait for each rank. The function
    collects at logged steps, and at least every 50 steps, and ignores objects from before the block, so
    a collection is short. If the program has turned the collection off, nothing changes.

    Source: torchtitan's ``GarbageCollection``.
    """
    if not gc.isenabled():
        yield lambda _: None
        return
    every = min(log_every, _MOST_STEPS)

    def collect(step: int) -> None:
        if step % every == 0:
            gc.collect()

    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield collect
    finally:
        gc.enable()
        gc.unfreeze()
