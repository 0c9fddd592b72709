"""Parsing a report in tests."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

LOADING = ("src", "srcset", "href", "xlink:href", "data", "poster", "action", "background")
VOID = ("meta", "br", "hr", "input")


class Page(HTMLParser):
    """The structure of a page: headings, ids, loading attributes, the visible text, and the data."""

    def __init__(self, path: Path) -> None:
        """Parse ``path``; an element that is not closed is an error."""
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.loads: list[str] = []
        self.headings: list[str] = []
        self.words = ""
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note an element."""
        self.tags.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            elif name in LOADING:
                self.loads.append(value or "")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note an element of SVG that closes itself."""
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        """Close an element."""
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        """Collect text."""
        if self.open and self.open[-1] == "h2":
            self.headings.append(data)
        if not {"style", "script"} & set(self.open):
            self.words += data

    @property
    def markup(self) -> str:
        """The source without scripts."""
        return re.sub(r"<script.*?</script>", "", self.source, flags=re.DOTALL)

    @property
    def data(self) -> dict[str, Any]:
        """The data of the figures."""
        text = re.search(r'<script type="application/json" id="data">(.*?)</script>', self.source)
        assert text is not None
        found: dict[str, Any] = json.loads(text[1])
        return found

    def run(self, name: str) -> dict[str, Any]:
        """The data of a run."""
        (found,) = [run for run in self.data["runs"] if run["name"] == name]
        return found
