"""How ranks fail together; no torch, because ranks also fail before they have it."""

from hpcrun.errors import UserError


class KnownToAll(UserError):
    """A user's error that all ranks know of, as rank 0 prints it.

    ``everywhere``: every node has the cause at this start. ``certain``: no node can change the failure.
    ``host``: the node of the first rank that has the cause.
    """

    def __init__(
        self, line: str, *, everywhere: bool = True, certain: bool = True, host: str | None = None
    ) -> None:
        super().__init__(line)
        self.everywhere, self.certain, self.host = everywhere, certain, host


class ToldByRankZero(UserError):
    """A user's error that rank 0 prints: the other ranks end quietly, with the same exit code."""


class SaysAll(RuntimeError):
    """A stop by design: its text says all, and where it was raised would only hide that."""


class NotTrainable(UserError, SaysAll):
    """What a task gives cannot be trained on: any rank may come to it, alone, at any step."""


class NotDeterministic(NotTrainable):
    """A kernel that train.deterministic does not allow."""


# Missing or closed files, missing names, and code that Python cannot read.
_TO_CORRECT = (
    *(FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError),
    *(ImportError, SyntaxError, NameError),
)
_OF_A_NODE = ("/dev/", "/proc/", "/sys/")
_OF_A_DRIVER = ("shared object", "undefined symbol", "GLIBC", "CUDA", "libcu")


def is_mistake(error: BaseException) -> bool:
    """Return True if ``error``, before the first step, would meet every other start too.

    Errors of a node, such as those of its devices and its driver's libraries, do not count.
    """
    if isinstance(error, OSError) and str(error.filename).startswith(_OF_A_NODE):
        return False
    if isinstance(error, ImportError) and any(word in str(error) for word in _OF_A_DRIVER):
        return False
    return isinstance(error, _TO_CORRECT)


class PeerFailed(RuntimeError):
    """Another rank has failed, and says itself how."""


def known_to_all(
    line: str,
    rank: int,
    *,
    everywhere: bool = True,
    certain: bool = True,
    host: str | None = None,
) -> UserError:
    """Return the error to raise on ``rank`` when every rank knows the same ``line``.

    Args:
        everywhere: every node has the cause at this start.
        certain: no node can change the failure.
        host: the node of the first rank that has the cause; None: this node.
    """
    if rank != 0:
        return ToldByRankZero(line)
    return KnownToAll(line, everywhere=everywhere, certain=certain, host=host)
