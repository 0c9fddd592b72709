"""Where the training stands, for whoever has to say where it broke or hangs."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

TRAINING = "training"
PREPARING = "preparing the data"


@dataclass
class Position:
    """The step under computation, None before the first, and what is done in it, or around the steps.

    Written by plain assignments, read by the watchdog's thread at any time. ``start``: the step that this
    process began at.
    """

    step: int | None = None
    doing: str = "starting"
    start: int = 0

    @contextlib.contextmanager
    def at(self, work: str) -> Iterator[None]:
        """Say that the block does ``work``, and after it what was done before. Of one that fails it stays."""
        before, self.doing = self.doing, work
        yield
        self.doing = before
