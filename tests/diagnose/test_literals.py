"""The plain text that an expression requires: no match of an entry is lost by the search for it."""

import pytest

from hpcrun.diagnose.catalog import entries
from hpcrun.diagnose.literals import cover, literals


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("DUE TO TIME LIMIT", ("due to time limit",)),
        (r"free\(\): (invalid|double free)", ("free(): ",)),
        (r"(?i)mismatch in world.?size", ("mismatch in world",)),
        (r"sacct: job \S+ ended as (A|B)", ("sacct: job ",)),
        ("colou?r of(ten)? things", (" things",)),
        ("(left|right)+ x", ("left", "right")),
        ("ab{0,2}cd?", ()),
        ("ab{2}cd", ("ab",)),
        ("(?<!a)bcd(?=efg)", ("bcd",)),
        ("one|tw.", ("one", "tw")),
        ("one|.*", ()),
        (r"[]a-c]xyz\d", ("xyz",)),
    ],
)
def test_the_required_text_of_an_expression(pattern: str, expected: tuple[str, ...]) -> None:
    assert literals(pattern) == expected


def test_every_expression_of_the_catalog_requires_a_text() -> None:
    assert [entry.id for entry in entries() if not all(entry.required)] == []


def test_a_cover_has_a_word_of_each_text() -> None:
    texts = ["no space left", "space is rare", "cxi", "with time"]
    words = cover(texts)
    assert all(any(word in text for word in words) for text in texts)
    assert len(words) < len(texts)
