"""The one exception that every door turns into a single line and exit code 2.

It is a leaf that any room may import, so that a command never has to know which room refused.
"""


class UserError(Exception):
    """Bad input: the text is one clear line saying what, where and what to do about it."""

    @property
    def lines(self) -> list[str]:
        """A line for each thing that is wrong."""
        return [str(self)]
