"""Position of a rank in training: its step and its activity, which the watchdog reads."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

TRAINING = "training"
COMPILING = "compiling"
CONNECTING = "connecting the GPUs"
PREPARING = "preparing the data"
PROFILING = "profiling"
VALIDATING = "validating"


@dataclass
class Position:
    """The current step (None before the first) and the current activity, in a step or outside.

    Written by plain assignments; the watchdog's thread may read it at any time. ``start``: the first step of
    this process. ``parts``: completed parts of long work; a change shows the watchdog that the work advances.
    """

    step: int | None = None
    doing: str = "starting"
    start: int = 0
    parts: int = 0

    @contextlib.contextmanager
    def at(self, work: str) -> Iterator[Callable[[], None]]:
        """Set ``doing`` for the block and restore it on success; after an exception it keeps the activity.

        The context yields :meth:`advance`.
        """
        before, self.doing = self.doing, work
        yield self.advance
        self.doing = before

    def advance(self) -> None:
        """Count a completed part of the current work."""
        self.parts += 1

    def place(self) -> tuple[int | None, str, int]:
        """Return step, activity and completed parts; a change shows the watchdog progress."""
        return self.step, self.doing, self.parts


@contextlib.contextmanager
def showing_compilation(position: Position, *, wanted: bool) -> Iterator[None]:
    """Within the block, the position of a step in which torch compiles is ``COMPILING``.

    A new shape of a batch, or the first validation, compiles for minutes at any step.
    """
    if not wanted and "torch._dynamo" not in sys.modules:
        yield
        return
    from torch._dynamo.callback import callback_handler

    # The arguments depend on the version of torch.
    def begin(*_: object) -> None:
        if position.doing == TRAINING:
            position.doing = COMPILING

    def end(*_: object) -> None:
        if position.doing == COMPILING:
            position.doing = TRAINING

    callback_handler.register_start_callback(begin)
    callback_handler.register_end_callback(end)
    try:
        yield
    finally:
        # torch._dynamo.reset() in user code removes all callbacks.
        with contextlib.suppress(ValueError):
            callback_handler.remove_start_callback(begin)
        with contextlib.suppress(ValueError):
            callback_handler.remove_end_callback(end)
