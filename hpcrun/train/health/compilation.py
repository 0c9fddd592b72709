"""Show in a rank's position that torch.compile is at work, so that a recompilation does not count as a hang.

A new shape of a batch, or the first validation, compiles for minutes at any step.
"""

import contextlib
import sys
from collections.abc import Iterator

from hpcrun.train.phase import COMPILING, TRAINING, Position


@contextlib.contextmanager
def shown_in(position: Position, *, wanted: bool) -> Iterator[None]:
    """Within the block, the position of a step in which torch compiles is ``COMPILING``.

    Args:
        wanted: the model is compiled; otherwise do so only if the compiler is loaded already.
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
