"""Errors of ranks that fail together; imports no torch, because ranks may fail before torch is loaded."""

from hpcrun.errors import UserError


class ErrorOnAllRanks(UserError):
    """User error known to all ranks; rank 0 prints it.

    ``everywhere``: every node has the cause at this start. ``certain``: no node can change the failure.
    ``host``: the node of the first rank that has the cause.
    """

    def __init__(
        self, line: str, *, everywhere: bool = True, certain: bool = True, host: str | None = None
    ) -> None:
        super().__init__(line)
        self.everywhere, self.certain, self.host = everywhere, certain, host


class PrintedByRankZero(UserError):
    """User error that rank 0 prints: the other ranks exit without output, with the same exit code."""


class PlannedStop(RuntimeError):
    """Intended stop with a complete message; printed without a traceback."""


class NotTrainable(UserError, PlannedStop):
    """The task's model or loss cannot be trained; any single rank may find this at any step."""


class NotDeterministic(NotTrainable):
    """A kernel is not deterministic, which train.deterministic forbids."""


class NotSameBits(NotTrainable):
    """A resume would change the last bits, which train.deterministic=strict forbids."""


# Missing or closed files, missing names, and code that Python cannot read.
_TO_CORRECT = (
    *(FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError),
    *(ImportError, SyntaxError, NameError),
)
_OF_A_NODE = ("/dev/", "/proc/", "/sys/")
_OF_A_DRIVER = ("shared object", "undefined symbol", "GLIBC", "CUDA", "libcu")


def is_mistake(error: BaseException) -> bool:
    """Return True if ``error``, raised before the first step, would occur at every other start too.

    Errors of a node, such as those of its devices and its driver's libraries, do not count.
    """
    if isinstance(error, OSError) and str(error.filename).startswith(_OF_A_NODE):
        return False
    if isinstance(error, ImportError) and any(word in str(error) for word in _OF_A_DRIVER):
        return False
    return isinstance(error, _TO_CORRECT)


class PeerFailed(RuntimeError):
    """Another rank has failed and reports the cause itself."""


def error_on_all_ranks(
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
        return PrintedByRankZero(line)
    return ErrorOnAllRanks(line, everywhere=everywhere, certain=certain, host=host)
