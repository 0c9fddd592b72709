"""Ranks as forks of a process that has imported torch; see ``@forked`` in ``tests/support/on_ranks.py``."""

import ctypes
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.support.training.nccl_rules import recorded, require_rules_kept

_PR_SET_PDEATHSIG = 1


def fork_ranks(
    world_size: int, play: Callable[[int], object], logs: Path | None = None
) -> list[int]:
    """Run ``play(rank)`` in a child for each rank and return their exit codes (negative: a signal).

    The children are killed at the end of this process.

    Args:
        logs: folder for the output of each rank, ``rank-0.log``; None: the streams of this process.

    Raises:
        BreaksNCCL: a rank has broken a rule of NCCL, or ranks that ended together made other collectives.
    """
    # Exit functions of a child would remove a TemporaryDirectory.
    folder = Path(tempfile.mkdtemp(prefix="forks-"))
    calls = [folder / f"rank-{rank}" for rank in range(world_size)]

    def ruled(rank: int) -> None:
        recorded(calls[rank])
        play(rank)

    try:
        codes = _fork(world_size, ruled, logs)
        require_rules_kept(calls, codes)
        return codes
    finally:
        shutil.rmtree(folder)


def _fork(world_size: int, play: Callable[[int], object], logs: Path | None) -> list[int]:
    sys.stdout.flush()
    sys.stderr.flush()
    children, parent = [], os.getpid()
    for rank in range(world_size):
        child = os.fork()
        if child == 0:
            try:
                ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
                if os.getppid() != parent:
                    os._exit(99)
                if logs is not None:
                    log = os.open(logs / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                    os.dup2(log, 1)
                    os.dup2(log, 2)
                play(rank)
                sys.stdout.flush()
                os._exit(0)
            except SystemExit as ended:
                sys.stdout.flush()
                os._exit(int(ended.code or 0))
            except BaseException:
                sys.excepthook(*sys.exc_info())
                sys.stderr.flush()
                os._exit(99)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
