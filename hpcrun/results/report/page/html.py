"""HTML elements; every text is escaped unless it is already markup."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from hpcrun.printing import escaped

_VOID = ("meta", "br", "hr")


class Markup(str):
    """Text that is already HTML; other text is escaped."""


def element(tag: str, *children: object, **attributes: str) -> Markup:
    """Return an element; ``class_`` is the attribute class. None and False children are left out."""
    named = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escape(value)}"'
        for name, value in attributes.items()
    )
    if tag in _VOID:
        return Markup(f"<{tag}{named}>")
    return Markup(f"<{tag}{named}>{text(*children)}</{tag}>")


def text(*children: object) -> Markup:
    """Return the joined children; text that is not markup is escaped.

    Control characters become visible escapes: a log line may hold a sequence that a terminal obeys
    after it is copied from the page.
    """
    return Markup("".join(map(_child, children)))


def _child(child: object) -> str:
    if child is None or child is False:
        return ""
    if isinstance(child, Markup):
        return child
    if isinstance(child, list | tuple):
        return text(*child)
    return escape(escaped(str(child)))


def table(
    head: Sequence[object],
    rows: Iterable[Sequence[object]],
    numeric: Iterable[int] = (),
    wide: Iterable[int] = (),
) -> Markup:
    """Return a table in a box that scrolls.

    Args:
        numeric: columns that are aligned to the right.
        wide: columns of long texts, which get room for a line of words.
    """
    classes = dict.fromkeys(numeric, "n") | dict.fromkeys(wide, "w")

    def cells(tag: str, row: Sequence[object]) -> Markup:
        return text(
            *(
                element(tag, cell, **({"class_": classes[at]} if at in classes else {}))
                for at, cell in enumerate(row)
            )
        )

    body = [element("tr", cells("td", row)) for row in rows]
    whole = element(
        "table",
        element("thead", element("tr", cells("th", head))),
        element("tbody", *body),
    )
    return element("div", whole, class_="box")
