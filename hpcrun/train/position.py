"""Where the training stands, for whoever has to say where it broke or hangs."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

TRAINING = "training"


@dataclass
class Position:
    """The step under computation, None before the first, and what is done in it.

    Written by plain assignments in the training loop, read by the watchdog's thread at any time.
    """

    step: int | None = None
    doing: str = TRAINING

    @contextlib.contextmanager
    def at(self, work: str) -> Iterator[None]:
        """Say that the block does other ``work`` than training: a save, a validation."""
        self.doing = work
        yield
        self.doing = TRAINING
