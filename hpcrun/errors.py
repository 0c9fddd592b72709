"""The exception that every entry point turns into a single line and exit code 2.

This base module may be imported by every package, so a command need not know which package refused.
"""


class UserError(Exception):
    """Bad input: the text has a line for each problem, with its place and the remedy.

    The base of hpcrun's exceptions for users. A command prints the text and ends with exit code 2.
    """

    certain = False
    """True if no node can change the failure."""

    @property
    def lines(self) -> list[str]:
        """One line for each problem."""
        return [str(self)]


def one_line(error: Exception) -> str:
    """Return the first line of ``error``, with its type unless it is a UserError."""
    text = (str(error).splitlines() or [""])[0]
    return text if isinstance(error, UserError) else f"{type(error).__name__}: {text}"


class ClusterError(UserError):
    """The environment, or an answer of the scheduler, cannot be used; one line gives the reason."""


class NodeUnfit(ClusterError):
    """A node lacks what the job needs, and another node may have it."""


class LaunchError(UserError):
    """A job that cannot be launched, found or signalled; the text gives the reason and the remedy."""


class SubmissionUnanswered(LaunchError):
    """sbatch got no answer: the job may exist or not."""


class NetworkError(UserError):
    """A file, a setting or a node that the network tools cannot use; the text has the reason."""


class ResultsError(UserError):
    """Files, an option or a table that the results cannot use; each argument is a line with a reason."""

    @property
    def lines(self) -> list[str]:
        """One line for each problem."""
        return [*self.args]


class ErrorOnAllRanks(UserError):
    """User error known to all ranks; rank 0 prints it.

    ``certain``: no node can change the failure. ``host``: the node of the first rank that has the cause.
    """

    def __init__(self, line: str, *, certain: bool = True, host: str | None = None) -> None:
        super().__init__(line)
        self.certain, self.host = certain, host


class PrintedByRankZero(UserError):
    """User error that rank 0 prints: the other ranks exit without output, with the same exit code."""


class PeerFailed(RuntimeError):
    """Another rank has failed and reports the cause itself."""


def error_on_all_ranks(
    line: str,
    rank: int,
    *,
    certain: bool = True,
    host: str | None = None,
) -> UserError:
    """Return the error to raise on ``rank`` when every rank knows the same ``line``.

    Args:
        certain: no node can change the failure.
        host: the node of the first rank that has the cause; None: this node.
    """
    if rank != 0:
        return PrintedByRankZero(line)
    return ErrorOnAllRanks(line, certain=certain, host=host)


class PlannedStop(RuntimeError):
    """Intended stop with a complete message; printed without a traceback."""


class NotTrainable(UserError, PlannedStop):
    """The task's model or loss cannot be trained; any single rank may find this at any step."""

    certain = True


class NotDeterministic(NotTrainable):
    """A kernel is not deterministic, which train.deterministic forbids."""


class NotSameBits(NotTrainable):
    """A resume would change the last bits, which train.deterministic=strict forbids."""
