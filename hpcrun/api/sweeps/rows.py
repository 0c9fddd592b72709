"""The parts of a sweep: values with the user's text, and blocks of rows that are multiplied."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpcrun.config import ConfigError, Problem


@dataclass(frozen=True)
class SweepValue:
    """One value of a key: as the config has it, and as the user wrote it (for a command)."""

    value: Any
    text: str


Row = Mapping[str, SweepValue]
"""The values of one element by dotted key."""


@dataclass(frozen=True)
class RowBlock:
    """Rows with the same keys; ``place``: the option, or the line of the file, that contains them."""

    rows: Sequence[Row]
    place: str

    @property
    def keys(self) -> list[str]:
        """The keys of the rows, in the user's order."""
        return list(dict.fromkeys(key for row in self.rows for key in row))


@dataclass(frozen=True)
class Condition:
    """An expression that is true for every element of the sweep."""

    text: str
    place: str


@dataclass(frozen=True)
class SweepRequest:
    """The requested sweep: the product of ``blocks``, without the rows that a condition excludes."""

    blocks: Sequence[RowBlock] = ()
    conditions: Sequence[Condition] = field(default=())

    def place_of(self, key: str) -> str:
        """Return the option or file line with the values of ``key``."""
        return next((block.place for block in self.blocks if key in block.keys), "--sweep")


def text_of(value: Any) -> str:
    """Return ``value`` as a word for a command: text as it is, everything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value)


def plain(value: Any) -> SweepValue:
    """Return a :class:`SweepValue` for ``value``, with a text made from it."""
    return SweepValue(value, text_of(value))


def canonical(values: Mapping[str, Any]) -> str:
    """Return a text that is equal for equal values: 1 equals 1.0, and the order of keys does not matter."""
    return json.dumps({key: _number(values[key]) for key in sorted(values)}, sort_keys=True)


def refusal(place: str, key: str, text: str) -> ConfigError:
    """Return the error with one line: place, key and problem."""
    return ConfigError([Problem(place, key, text)])


def _number(value: Any) -> Any:
    whole = isinstance(value, int) and not isinstance(value, bool)
    return float(value) if whole and abs(value) < 2**53 else value
