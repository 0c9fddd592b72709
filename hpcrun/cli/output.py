"""Output of the program: JSON on one line, and text that every terminal can show."""

import json
import sys
import unicodedata
from collections.abc import Sequence
from typing import Any

from hpcrun.printing import say
from hpcrun.run.io.files import finite


def print_json(value: Any) -> None:
    """Print ``value`` on one line. JSON (RFC 8259) has no NaN and no infinity, so they become null."""
    say(json.dumps(finite(value), ensure_ascii=True, allow_nan=False))


def aligned(rows: Sequence[Sequence[str]], *, right: bool = False) -> list[str]:
    """Return a line for each of ``rows``, with its cells in columns; the last column is not padded.

    Args:
        right: align the cells of a column at its right end.
    """
    widths = [max(map(cells_wide, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        blanks = [" " * (width - cells_wide(cell)) for width, cell in zip(widths, row, strict=True)]
        pairs = list(zip(row, blanks, strict=True))[:-1]
        padded = [blank + cell if right else cell + blank for cell, blank in pairs]
        lines.append("  ".join([*padded, row[-1]]))
    return lines


def cells_wide(text: str) -> int:
    """Return the columns that ``text`` takes on a terminal: CJK letters and emoji take two."""
    if text.isascii():
        return len(text)
    return sum(
        0
        if unicodedata.combining(letter)
        else 2 - (unicodedata.east_asian_width(letter) not in "WF")
        for letter in text
    )


def make_printable() -> None:
    """Print characters that the terminal's encoding lacks as escapes, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
