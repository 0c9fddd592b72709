#!/usr/bin/env python3
"""Measure the prose of the repository: tools/prose.py [--list] [AREA ...]

It counts the words of tools/prose_words.txt in Markdown, comments, docstrings and messages, and
docstrings that begin with a question word. CEILINGS holds the limits of each area; the exit code
of an area above a limit is 1. `--list` prints every place.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
WORDS = Path(__file__).with_name("prose_words.txt")

# Area: (marker words per 1,000 words, percent of docstrings that begin with a question word).
# The goal is (1.0, 2.0) everywhere. Lower a number after a rewrite; never raise a number.
CEILINGS = {
    "hpcrun": (0.6, 2.0),
    "docs": (0.6, 2.0),
    "README.md": (0.6, 2.0),
    "tests": (1.0, 2.0),
    "tools": (0.6, 2.0),
}

_QUESTION = re.compile(r"(?:What|Whether|Which|How|Who)\b")
_CODE = re.compile(r"```.*?```|`[^`]*`", re.DOTALL)
# The table in docs/style.md lists these words.
_LISTS_THE_WORDS = ("docs/style.md",)
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass
class Measured:
    """The counts of an area. ``places``: a line ``path:line: word`` for each marker word and docstring."""

    words: int = 0
    markers: int = 0
    docstrings: int = 0
    questions: int = 0
    places: list[str] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Marker words per 1,000 words."""
        return 1000 * self.markers / max(self.words, 1)

    @property
    def share(self) -> float:
        """Percent of the docstrings that begin with a question word."""
        return 100 * self.questions / max(self.docstrings, 1)


def markers() -> re.Pattern[str]:
    """Return the expression for all marker words."""
    lines = WORDS.read_text(encoding="utf-8").splitlines()
    found = [line.partition("=>")[0].strip() for line in lines if not line.startswith("#")]
    return re.compile(rf"\b(?:{'|'.join(word for word in found if word)})\b", re.IGNORECASE)


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of every piece of prose in a Markdown or Python file.

    Raises:
        SyntaxError: the Python file cannot be parsed.
    """
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        yield from enumerate(_CODE.sub(_blank, text).splitlines(), 1)
        return
    for node in ast.walk(ast.parse(text)):
        text_here = node.value if isinstance(node, ast.Constant) else None
        # One or two words are keys and names.
        if isinstance(text_here, str) and len(text_here.split()) > 2:
            yield node.lineno, text_here
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")


def _blank(found: re.Match[str]) -> str:
    return " " + "\n" * found[0].count("\n")


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of every docstring of a Python file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, _DOCUMENTED) and (text := ast.get_docstring(node)):
            yield node.body[0].lineno, text


def measure(area: str) -> Measured:
    """Return the counts of an area: a folder or a file of the repository."""
    place = ROOT / area
    files = [place] if place.is_file() else sorted([*place.rglob("*.py"), *place.rglob("*.md")])
    expression, found = markers(), Measured()
    for path in files:
        name = path.relative_to(ROOT).as_posix()
        if name in _LISTS_THE_WORDS:
            continue
        for line, text in prose(path):
            hits = expression.findall(text)
            found.words += len(text.split())
            found.markers += len(hits)
            found.places += [f"{name}:{line}: {hit}" for hit in hits]
        for line, text in docstrings(path) if path.suffix == ".py" else ():
            found.docstrings += 1
            if _QUESTION.match(text):
                found.questions += 1
                found.places.append(f"{name}:{line}: docstring begins with {text.split()[0]}")
    return found


def above(area: str, found: Measured) -> list[str]:
    """Return a line for each limit of ``area`` that the counts exceed."""
    rate, share = CEILINGS[area]
    lines = []
    if found.rate > rate:
        lines.append(f"{area}: {found.rate:.2f} marker words per 1,000, at most {rate}")
    if found.share > share:
        lines.append(f"{area}: {found.share:.1f} % of docstrings ask a question, at most {share}")
    return lines


def main(arguments: list[str]) -> int:
    """Print the counts of the areas and return the exit code."""
    areas = [word for word in arguments if word != "--list"] or list(CEILINGS)
    failed = False
    for area in areas:
        found = measure(area)
        print(f"{area}: {found.rate:.2f} marker words per 1,000 of {found.words}; "
              f"{found.share:.1f} % of {found.docstrings} docstrings ask a question")  # fmt: skip
        if "--list" in arguments:
            print(*found.places, sep="\n")
        problems = above(area, found) if area in CEILINGS else []
        print(*problems, sep="\n", end="\n" if problems else "")
        failed = failed or bool(problems)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
