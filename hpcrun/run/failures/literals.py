"""The text that a line must contain so that a regular expression can match it.

A search for plain text takes a hundredth of the time of a search for an expression. The catalog has hundreds
of expressions, and a log has millions of lines.
"""

import re
from collections import Counter
from collections.abc import Iterable
from typing import Generic, TypeVar

_GRAM = 4
# Sequences of ordinary output.
_COMMON = re.compile(
    r"erro|rror|ror:|fail|aile|iled|tion|ing |ed t|ed b|data|file|load|loss|mode|node|rank|step|time"
    r"|size|devi|proc|cess|with|torc|hon3|/usr|usr/|/lib|home|epoc|ckpt|not "
)
_CLASS = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]")
_QUANTIFIER = re.compile(r"(?:[*+?]|\{(\d*),?\d*\})\??")
_GROUP = re.compile(r"\(\?(?:[a-zA-Z]+\)|[a-zA-Z-]+:|:|P<\w+>|(?P<look><?[=!]))")
_MANY = 16
"""Texts: an expression with more alternatives is searched in every line."""


def literals(pattern: str) -> tuple[str, ...]:
    """Return texts in lower case, with at least one in each match of ``pattern``; empty if unknown."""
    found, _ = _alternatives(pattern, 0)
    return found if len(found) <= _MANY else ()


def _alternatives(pattern: str, at: int) -> tuple[tuple[str, ...], int]:
    """Return the texts of the alternatives from ``at`` to the end of their group, and its place."""
    branches: list[tuple[str, ...]] = []
    while True:
        branch, at = _branch(pattern, at)
        branches.append(branch)
        if at >= len(pattern) or pattern[at] == ")":
            break
        at += 1
    if not all(branches):
        return (), at
    return tuple(dict.fromkeys(text for branch in branches for text in branch)), at


def _branch(pattern: str, at: int) -> tuple[tuple[str, ...], int]:
    """Return the texts of one alternative, and the place of the character that ends it."""
    found: list[tuple[str, ...]] = []
    run = ""
    while at < len(pattern) and pattern[at] not in "|)":
        texts, char, at = _atom(pattern, at)
        repeated = _QUANTIFIER.match(pattern, at)
        optional = False
        if repeated:
            optional = repeated[0][0] in "*?" or repeated[1] in ("", "0")
            at = repeated.end()
        if char and not optional:
            run += char
        if repeated or not char:
            found.append((run,))
            run = ""
        if texts and not optional:
            found.append(texts)
    best = max([*found, (run,)], key=lambda texts: min(map(len, texts)))
    return (best if min(map(len, best)) > 1 else ()), at


def _atom(pattern: str, at: int) -> tuple[tuple[str, ...], str, int]:
    """Return the texts of a group, or else one plain character, and the place after the atom."""
    char = pattern[at]
    if char == "(":
        opened = _GROUP.match(pattern, at)
        if opened and opened[0].endswith(")"):
            return (), "", opened.end()
        texts, end = _alternatives(pattern, opened.end() if opened else at + 1)
        return (() if opened and opened["look"] else texts), "", end + 1
    if char == "[":
        found = _CLASS.match(pattern, at)
        assert found, pattern
        return (), "", found.end()
    if char == "\\":
        escaped = pattern[at + 1]
        return (), ("" if escaped.isalnum() else escaped.lower()), at + 2
    return (), ("" if char in ".^$" else char.lower()), at + 1


T = TypeVar("T")


class Grams(Generic[T]):
    """Texts with values, found in a line by its sequences of four characters.

    A line of 80 characters has 77 sequences. To look them up takes less time than a search for each text.
    """

    def __init__(self, texts: Iterable[tuple[str, T]]) -> None:
        known = list(texts)
        counts = Counter(gram for text, _ in known for gram in _grams(text))
        self._grams: dict[str, list[tuple[str, T]]] = {}
        self._short = [one for one in known if len(one[0]) < _GRAM]
        for one in known:
            if len(one[0]) >= _GRAM:
                # A sequence that many texts have is frequent in logs of errors too.
                gram = min(
                    _grams(one[0]), key=lambda gram: (bool(_COMMON.search(gram)), counts[gram])
                )
                self._grams.setdefault(gram, []).append(one)

    def found(self, line: str) -> list[T]:
        """Return the values of the texts that ``line``, in lower case, contains."""
        grams = self._grams.keys() & _grams(line)
        possible = [*self._short, *(one for gram in grams for one in self._grams[gram])]
        return [value for text, value in possible if text in line]


def _grams(text: str) -> set[str]:
    return {text[at : at + _GRAM] for at in range(len(text) - _GRAM + 1)}
