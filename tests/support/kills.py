"""Kill a program at each of its operations on files, and within its writes."""

import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator

_OPERATIONS = frozenset(("open", "os.link", "os.mkdir", "os.rename", "os.remove", "os.rmdir"))
_SIZES = (0, 1, 50, 1000)


def killed_at_each_step(work: Callable[[], object]) -> Iterator[str]:
    """Run ``work`` in one child after another, and yield after each but the last.

    The first children are killed when a file becomes larger than some sizes. Then the n-th child is killed
    before its n-th operation: opening, fsync, rename, making and removing. The last child does all its work.

    Yields:
        The place of the kill, for messages.
    """
    for size in _SIZES:
        _killed(work, sys.maxsize, size)  # Not if all files are smaller.
        yield f"byte {size + 1} of a file"
    number = 1
    while _killed(work, number, resource.RLIM_INFINITY):
        yield f"operation {number}"
        number += 1


def _killed(work: Callable[[], object], last: int, size: int) -> bool:
    child = os.fork()
    if child == 0:
        _run(work, last, size)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) in (signal.SIGKILL, signal.SIGXFSZ)
        return True
    assert os.WEXITSTATUS(status) == 0, "the work failed without a kill"
    return False


def _run(work: Callable[[], object], last: int, size: int) -> None:
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
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
        os.fsync = fsync
        sys.addaudithook(lambda event, _: count(event))
        work()
        code = 0
    finally:
        os._exit(code)
