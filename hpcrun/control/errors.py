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
