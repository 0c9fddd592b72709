"""A debugger for one rank of a test: ``HPCRUN_TEST_DEBUG=1`` opens pdb on the terminal if rank 1 fails.

    HPCRUN_TEST_DEBUG=1 python -m pytest -n 0 --timeout 0 tests/checkpoint/test_elastic.py -k two

``breakpoint()`` opens the debugger on that rank too, and does nothing on the other ranks. The limit of the
test does not count this time, and the other ranks wait.
"""

import os
import pdb
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

VARIABLE = "HPCRUN_TEST_DEBUG"
WAIT_SECONDS = 24 * 3600.0
"""Time that the other ranks wait in a collective."""

_TERMINAL = Path("/dev/tty")


def is_on() -> bool:
    """Return True if a person debugs a rank."""
    return bool(os.environ.get(VARIABLE))


class RankDebugger:
    """The debugger in a rank.

    Args:
        rank: the rank of this process.
        open_file: exists while the debugger is open.
    """

    def __init__(self, rank: int, open_file: Path) -> None:
        self._chosen = os.environ.get(VARIABLE) == str(rank)
        self._rank, self._open_file = rank, open_file
        if is_on():
            sys.breakpointhook = self._stop

    def look_at(self, error: BaseException) -> None:
        """Open the debugger at the place of ``error``, on the chosen rank only."""
        if self._chosen:
            self._run(lambda debugger: debugger.interaction(None, error.__traceback__))

    def _stop(self) -> None:
        caller: FrameType = sys._getframe(1)
        if self._chosen:
            self._run(lambda debugger: debugger.interaction(caller, None))

    def _run(self, look: Callable[[pdb.Pdb], object]) -> None:
        self._open_file.touch()
        try:
            # pytest holds the streams of this process; the terminal is still there.
            with _TERMINAL.open(encoding="utf-8") as keys, _TERMINAL.open("w") as screen:
                print(f"\nrank {self._rank} stops here; q continues the test", file=screen)
                debugger = pdb.Pdb(stdin=keys, stdout=screen)
                debugger.reset()
                look(debugger)
        finally:
            self._open_file.unlink()
