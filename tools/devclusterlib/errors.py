"""The ways the tool ends badly; each is one line on the screen and an exit code."""

from __future__ import annotations

LONGEST_QUOTE = 400


class Refusal(Exception):
    """The tool cannot or will not do what was asked; the person can change that.

    Parameters
    ----------
    what : str
        What is wrong, as one line.
    remedy : str
        What to do about it, as one line.
    """

    exit_code = 2

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(f"{what}; {remedy}")
        self.what = what
        self.remedy = remedy


class Unavailable(Refusal):
    """Packages cannot be fetched here and now; a caller that can do without them goes on."""

    exit_code = 3


class CommandFailed(Refusal):
    """An external program refused; its own words are the best explanation there is."""

    def __init__(self, argv: list[str], returncode: int, words: str) -> None:
        self.argv = argv
        self.returncode = returncode
        # A refusal is one line, and programs like to draw arrows below their messages.
        self.words = " ".join(words.split())[-LONGEST_QUOTE:] or "it said nothing"
        super().__init__(
            f"`{' '.join(argv[:6])}` failed with {returncode}: {self.words}",
            "see the logs of the cluster, then `devcluster down` and `up` again",
        )
