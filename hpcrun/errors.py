"""The exception that every entry point turns into a single line and exit code 2.

This base module may be imported by every package, so a command need not know which package refused.
"""


class UserError(Exception):
    """Bad input: the text has a line for each problem, with its place and the remedy.

    The base of hpcrun's exceptions for users. A command prints the text and ends with exit code 2.
    """

    @property
    def lines(self) -> list[str]:
        """One line for each problem."""
        return [str(self)]
