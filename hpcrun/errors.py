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
