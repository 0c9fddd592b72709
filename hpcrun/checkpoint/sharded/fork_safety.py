"""Closing of descriptors in forked children: those of a stage file and of a folder lock.

A child process such as a ``DataLoader`` worker inherits every descriptor. The space of the file, or the
lock, would stay in use until the last child has ended.
"""

import contextlib
import os
import weakref
from typing import Protocol


class Closable(Protocol):
    """An object that holds a descriptor."""

    def close(self) -> None:
        """Close the descriptor; a second call does nothing."""
        ...


_held: "weakref.WeakSet[Closable]" = weakref.WeakSet()


def close_in_children(thing: Closable) -> None:
    """Close ``thing`` in every process forked from now on, as long as this process uses it."""
    _held.add(thing)


def _close_all() -> None:
    for thing in list(_held):
        with contextlib.suppress(OSError):
            thing.close()


os.register_at_fork(after_in_child=_close_all)
