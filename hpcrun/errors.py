"""The exception that every entry point turns into a single line and exit code 2.

This base module may be imported by every package, so a command need not know which package refused.
"""


class UserError(Exception):
    """Bad input: the text is one clear line with the problem, its place and the remedy."""

    @property
    def lines(self) -> list[str]:
        """One line for each problem."""
        return [str(self)]
