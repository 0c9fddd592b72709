"""Problems of a config, one line each, so that a command reports all of them together."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpcrun.errors import UserError

if TYPE_CHECKING:
    from hpcrun.config.schema import Config

_LONGEST_VALUE = 60  # maximum characters of a refused value in a message


@dataclass(frozen=True)
class Problem:
    """A problem of a config.

    Attributes:
        place: a file with a line, a flag, or ``command line``.
        key: the dotted key; may be empty.
        text: the description, with a remedy.
    """

    place: str
    key: str
    text: str

    def __str__(self) -> str:
        return ": ".join(printable(part) for part in (self.place, self.key, self.text) if part)


class ConfigError(UserError):
    """A config that cannot be used; the text has one line for each problem.

    Attributes:
        problems: the problems.
        meant: the config if all problems are keys without effect, otherwise None.
    """

    def __init__(self, problems: Iterable[Problem], meant: Config | None = None) -> None:
        self.problems = tuple(problems)
        self.meant = meant
        super().__init__("\n".join(self.lines))

    @property
    def lines(self) -> list[str]:
        """Text of `problems`, one line each."""
        return [str(problem) for problem in self.problems]


def printable(text: str) -> str:
    """Return the text with escapes for line breaks and control characters."""
    return text if text.isprintable() else repr(text)[1:-1]


def value_text(value: Any) -> str:
    """Return a refused value as the user would write it, on one line and shortened."""
    text = repr(value) if isinstance(value, str) else json.dumps(value, default=repr)
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 1] + "…"
