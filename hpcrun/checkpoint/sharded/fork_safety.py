"""What the forked children of a training must not keep: a save's room on the node's disk, the folder's lock.

A descriptor that is closed here lives on in a child that has it too, as the workers of a ``DataLoader``
have, and with it the space of the file or the lock, until the last of them has ended.
"""

import contextlib
import os
import weakref
from typing import Protocol


class Closable(Protocol):
    """Something that holds a descriptor."""

    def close(self) -> None:
        """Let go of it; once more does nothing."""
        ...


_held: "weakref.WeakSet[Closable]" = weakref.WeakSet()


def close_in_children(thing: Closable) -> None:
    """Close ``thing`` in every process that is forked from now on, as long as it is in use here."""
    _held.add(thing)


def _close_all() -> None:
    for thing in list(_held):
        with contextlib.suppress(OSError):
            thing.close()


os.register_at_fork(after_in_child=_close_all)
