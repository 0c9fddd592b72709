"""The type of a column with values of several types. What does not fit becomes NaN, and is named."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcrun.run.files import parse_line, without_checksum

Part = tuple[NDArray[np.int64], NDArray[Any]]
"""The numbers of some rows, and their values: numbers, booleans, or texts as bytes."""

_NUMBER = re.compile(
    r"\s*[+-]?(?:(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?|inf(?:inity)?|nan)\s*", re.I | re.A
)
# A leading zero marks a name, such as that of job 007.
_NAME = re.compile(r"\s*[+-]?0\d")
# JSON has no such numbers, and loggers write them as texts.
_NOT_FINITE = re.compile(r"[+-]?(?:inf(?:inity)?|nan)", re.I)
# Numbers in the notation of a program or a country: tensor(0.8, device='cuda:0'), 1,234.5 and 81 %.
_LIKE = re.compile(
    r"(?:tensor|array|[\w.]*(?:float|int)\d+)\(.*\d.*\)|[+-]?\d[\d.]*[,'][\d,.']*\d|[+-]?[\d.,]+\s*%",
    re.A,
)
_SAMPLED = 20
_NAMED_LINES = 5
_LONGEST, _MOST_LINES = 60, 10


@dataclass(frozen=True)
class Misfit:
    """Values that do not fit their column: their ``rows``, the first as ``text``, and ``what`` it is."""

    column: str
    rows: NDArray[np.int64]
    text: str
    what: str

    def line(self, places: Sequence[int], noun: str = "line") -> str:
        """Return a line for people; ``places``: the numbers of the lines (or other ``noun``)."""
        first, *others = places
        text = self.text if len(self.text) <= _LONGEST else f"{self.text[:_LONGEST]}…"
        found = f'{self.column}: "{text}" in {noun} {first} {self.what}'
        if not others:
            return found
        shown = ", ".join(map(str, others[:_NAMED_LINES]))
        left = len(others) - _NAMED_LINES
        more = f" and {left:,} more" if left > 0 else ""
        return f"{found}; also {noun}{'s' * (len(others) > 1)} {shown}{more}"


def settled(key: str, parts: Sequence[Part], *, typed: bool) -> tuple[list[Part], list[Misfit]]:
    """Return the values of a column in one type: numbers, if at least half of them are, else texts.

    Args:
        key: the name of the column.
        parts: all values of the column.
        typed: the file marks texts, as JSON does. Then a text that is a number is named.
    """
    parts = _flags_as_texts(parts)
    numbers = [part for part in parts if part[1].dtype.kind != "S"]
    texts = [part for part in parts if part[1].dtype.kind == "S"]
    if not texts:
        return numbers, []
    if not numbers:
        sample = [text.decode() for text in texts[0][1][:_SAMPLED].tolist() if text]
        if sample and {text.lower() for text in sample} <= {"true", "false"} and not typed:
            flags = _flags(texts)
            return (texts, []) if flags is None else (flags, [])
        if not any(_number(text) is not None or _LIKE.fullmatch(text) for text in sample):
            return texts, []
    at = np.concatenate([rows for rows, _ in texts])
    words = [text.decode() for _, values in texts for text in values.tolist()]
    found = [_number(word) for word in words]
    rest = [n for n, number in enumerate(found) if number is None and words[n]]
    read = [n for n, number in enumerate(found) if number is not None]
    count = len(read) + sum(len(values) for _, values in numbers)
    if count and count >= len(rest):
        cells = np.array([np.nan if number is None else number for number in found])
        named = [n for n in read if not _NOT_FINITE.fullmatch(words[n].strip())] if typed else []
        misfits = [
            *_misfits(key, at, words, rest, "is no number, and read as NaN"),
            *_misfits(key, at, words, named, "is a text, and read as a number"),
        ]
        return [*numbers, (at, cells)], misfits
    if not count and all(_LIKE.fullmatch(words[n]) for n in rest):
        return texts, _misfits(key, at, words, rest, "is a text, not a number")
    if not (typed and count):
        return [*parts], []
    odd = [(row, value) for rows, values in numbers for row, value in _finite(rows, values)]
    odd += [(at[n], words[n]) for n in read]
    rows = np.array(sorted(row for row, _ in odd), np.int64)
    first = str(min(odd)[1]) if odd else ""
    what = "is a number among texts, and kept as text"
    return [*parts], [Misfit(key, rows, first, what)] if odd else []


def _number(text: str) -> float | None:
    if not _NUMBER.fullmatch(text) or _NAME.match(text):
        return None
    value = float(text)
    # Digits beyond the range of floats are no infinity.
    return None if math.isinf(value) and "n" not in text.lower() else value


def _misfits(
    key: str, at: NDArray[np.int64], words: Sequence[str], which: Sequence[int], what: str
) -> list[Misfit]:
    if not which:
        return []
    rows = at[which]
    return [Misfit(key, np.sort(rows), words[which[int(rows.argmin())]], what)]


def _flags_as_texts(parts: Sequence[Part]) -> list[Part]:
    """Return the parts, with booleans as texts if other parts have numbers beyond 0 and 1."""
    kinds = {values.dtype.kind for _, values in parts}
    if "b" not in kinds or kinds == {"b"}:
        return [*parts]
    others = [values for _, values in parts if values.dtype.kind not in "bS"]
    if all(np.isin(values[np.isfinite(values)], (0, 1)).all() for values in others):
        return [*parts]
    return [
        (rows, np.where(values, b"true", b"false") if values.dtype.kind == "b" else values)
        for rows, values in parts
    ]


def _flags(texts: Sequence[Part]) -> list[Part] | None:
    """Return texts as booleans; None if one is neither true nor false."""
    found: list[Part] = []
    for rows, values in texts:
        lower = np.char.lower(values)
        if not np.isin(lower, (b"true", b"false")).all():
            return None
        found.append((rows, lower == b"true"))
    return found


def _finite(rows: NDArray[np.int64], values: NDArray[Any]) -> Iterator[tuple[int, Any]]:
    good = np.isfinite(values)
    return zip(rows[good].tolist(), values[good].tolist(), strict=True)


def line_numbers(lines: Iterable[bytes], rows: Iterable[int]) -> dict[int, int]:
    """Return the line of each of ``rows``, counted from 1, in a file of JSON lines."""
    wanted, found = set(rows), {}
    row = 0
    for number, line in enumerate(lines, 1):
        if not wanted:
            break
        if without_checksum(line) is None or parse_line(line) is None:
            continue
        if row in wanted:
            wanted.remove(row)
            found[row] = number
        row += 1
    return found


def misfit_problems(
    misfits: Sequence[Misfit], places: Mapping[int, int], noun: str = "line"
) -> list[str]:
    """Return a line for each of the first ``misfits``, and one for the others.

    Args:
        misfits: of a file.
        places: the number of the line of each row.
        noun: what the numbers count.
    """
    found = [
        one.line([places.get(row, row + 1) for row in one.rows.tolist()], noun)
        for one in misfits[:_MOST_LINES]
    ]
    left = len(misfits) - len(found)
    return found + ([f"{left:,} more columns have values that do not fit"] if left else [])
