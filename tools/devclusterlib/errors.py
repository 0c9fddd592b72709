"""Errors of the tool; each one is a line on the screen and an exit code."""

from __future__ import annotations

LONGEST_QUOTE = 400


class Refusal(Exception):
    """A request that the tool cannot or will not fulfill; the user can change that.

    Parameters
    ----------
    what : str
        The problem, as one line.
    remedy : str
        The solution, as one line.
    """

    exit_code = 2

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(f"{what}; {remedy}")
        self.what = what
        self.remedy = remedy


class Unavailable(Refusal):
    """Packages that cannot be downloaded now; a caller may continue without them."""

    exit_code = 3


class CommandFailed(Refusal):
    """An external program that failed; its own message is the best explanation."""

    def __init__(self, argv: list[str], returncode: int, words: str) -> None:
        self.argv = argv
        self.returncode = returncode
        # A refusal is one line, and programs like to draw arrows below their messages.
        self.words = " ".join(words.split())[-LONGEST_QUOTE:] or "it said nothing"
        super().__init__(
            f"`{' '.join(argv[:6])}` failed with {returncode}: {self.words}",
            "see the logs of the cluster, then `devcluster down` and `up` again",
        )
