"""The plain text that an expression requires: no match of an entry is lost by the search for it."""

import pytest

from hpcrun.run.failures.catalog import entries
from hpcrun.run.failures.literals import Grams, literals


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


def test_the_texts_that_a_line_contains_are_found() -> None:
    texts = ["no space left", "space is rare", "cxi", "with time"]
    index = Grams((text, text) for text in texts)
    assert sorted(index.found("there was no space left; space is rare")) == texts[:2]
    assert sorted(index.found("cxi with time")) == ["cxi", "with time"]
    assert index.found("spa cxe") == index.found("") == []
