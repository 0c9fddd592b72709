"""What is wrong with a config, one line a problem, so that one run of a command shows them all."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpcrun.errors import UserError

if TYPE_CHECKING:
    from hpcrun.config.schema import Config

_LONGEST_VALUE = 60  # characters of a refused value that are shown: a line has to stay readable


@dataclass(frozen=True)
class Problem:
    """One thing wrong: where it was written, the dotted key (may be empty), and what to do."""

    place: str
    key: str
    text: str

    def __str__(self) -> str:
        return ": ".join(printable(part) for part in (self.place, self.key, self.text) if part)


class ConfigError(UserError):
    """A config that cannot be used; the text has one line for each of `problems`.

    `meant` is the config where all that is wrong with it is that keys of it do nothing.
    """

    def __init__(self, problems: Iterable[Problem], meant: Config | None = None) -> None:
        self.problems = tuple(problems)
        self.meant = meant
        super().__init__("\n".join(self.lines))

    @property
    def lines(self) -> list[str]:
        """A line for each of `problems`."""
        return [str(problem) for problem in self.problems]


def printable(text: str) -> str:
    """Return the text itself, or with escapes where a line break or a control would garble it."""
    return text if text.isprintable() else repr(text)[1:-1]


def value_text(value: Any) -> str:
    """Return a refused value as a person would have written it, on one line and cut short."""
    text = repr(value) if isinstance(value, str) else json.dumps(value, default=repr)
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 1] + "…"
