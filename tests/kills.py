"""Kill a program before each of its operations on files."""

import os
import signal
import sys
from collections.abc import Callable, Iterator

_OPERATIONS = frozenset(("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"))


def killed_before_each(work: Callable[[], object]) -> Iterator[int]:
    """Run ``work`` in one child after another, and yield after each that was killed.

    The n-th child is killed before its n-th operation: opening, fsync, rename, making and removing. The last
    child does all its work. Written data survive a kill, so a kill within a write needs no case of its own.

    Yields:
        The number of the operation that did not happen.
    """
    number = 0
    while True:
        number += 1
        child = os.fork()
        if child == 0:
            _run(work, number)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0, f"the work failed without a kill ({number})"
            return
        assert os.WTERMSIG(status) == signal.SIGKILL
        yield number


def _run(work: Callable[[], object], last: int) -> None:
    """Work in this process, which ends here."""
    done = 0

    def count(event: str) -> None:
        nonlocal done
        if event in _OPERATIONS or event == "fsync":
            done += 1
            if done == last:
                os.kill(os.getpid(), signal.SIGKILL)

    plain = os.fsync

    def fsync(handle: int) -> None:
        count("fsync")
        plain(handle)

    code = 1
    try:
        os.fsync = fsync
        sys.addaudithook(lambda event, _: count(event))
        work()
        code = 0
    finally:
        os._exit(code)
