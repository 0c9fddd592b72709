"""The text that a line must contain so that a regular expression can match it.

A search for plain text takes a hundredth of the time of a search for an expression. The catalog has hundreds
of expressions, and a log has millions of lines.
"""

import re
from collections import Counter
from collections.abc import Iterable

_WORD = re.compile(r"[a-z]{4,}")
# Words of ordinary output: a search for them would keep nearly every line.
_COMMON = re.compile(
    r"after|been|bytes|call|called|checkpoint|could|create|default|device|down|equal|event|file"
    r"|found|have|host|http|init|input|layer|load|loading|loss|many|match|memory|message|model|must"
    r"|name|need|node|number|nvidia|object|only|open|parameter|process|progress|range|rank|ranks"
    r"|received|same|should|size|state|status|step|still|such|tensor|this|time|torch|type|user|valid"
    r"|value|values|version|while|with"
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


def cover(texts: Iterable[str]) -> tuple[str, ...]:
    """Return few words such that each of ``texts`` contains one of them; rare words where possible."""
    left = set(texts)
    words: list[str] = []
    while left:
        counts = Counter(
            word
            for text in left
            for word in set(_WORD.findall(text))
            if not _COMMON.fullmatch(word)
        )
        word = counts.most_common(1)[0][0] if counts else min(left)
        words.append(word)
        left = {text for text in left if word not in text}
    return tuple(words)
