"""Text output for people: no other module prints to a terminal.

A task, a script, a node or a file may contain anything: escape sequences that clear the screen or write to
the clipboard, line breaks that forge a line, marks that reverse a text. Here, all of it is only data.
This base module may be imported by every package.
"""

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.live import Live

# Controls (C0, DEL, C1), line and paragraph separators, characters that reverse or hide text, surrogates.
# The joiners U+200C and U+200D are allowed: words of Persian and families of emoji need them.
_UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\U000e0000-\U000e0fff\ud800-\udfff]"
)
_NAMED = {"\n": "\\n", "\r": "\\r"}
_BYTES = range(0xDC80, 0xDD00)
"""Python's characters for bytes that are not UTF-8 (PEP 383)."""


def escaped(text: str) -> str:
    """Return ``text`` on one line, with an escape for every character that controls a terminal.

    Tabs become spaces. All letters, accents, CJK and emoji stay as they are.
    """
    return text if text.isprintable() else _UNSAFE.sub(_escape, text.expandtabs())


def _escape(found: "re.Match[str]") -> str:
    code = ord(found[0])
    if code in _BYTES:
        code -= 0xDC00
    if code < 0x100:
        return _NAMED.get(found[0], f"\\x{code:02x}")
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def logged(line: bytes) -> str:
    """Return a line of a log for display.

    Progress bars overwrite their line. Only the last text of such a line is shown, after ``…``.
    """
    *before, last = line.decode(errors="backslashreplace").rstrip("\r").split("\r")
    return escaped(f"… {last}" if any(before) else last)


def say(*lines: str, stream: TextIO | None = None) -> None:
    """Print each of ``lines``, escaped, on a separate line.

    Args:
        stream: standard output by default.

    Raises:
        OSError: the stream cannot be written.
    """
    text = "".join(f"{escaped(line)}\n" for line in lines)
    print(text, end="", file=stream, flush=True)


def say_aside(*lines: str) -> None:
    """Print like :func:`say`, on standard error."""
    say(*lines, stream=sys.stderr)


def quoted(text: str) -> Iterator[str]:
    """Yield the lines of a foreign text after a mark, so that no line looks like the program's own."""
    return (f"    | {line}" for line in text.rstrip("\n").split("\n"))


class Screen:
    """A whole terminal that is redrawn in place."""

    def __init__(self, live: "Live") -> None:
        self._live = live

    @property
    def size(self) -> tuple[int, int]:
        """The (columns, lines) of the terminal now."""
        size = self._live.console.size
        return size.width, size.height

    def show(self, lines: Sequence[tuple[str, str]]) -> None:
        """Replace all that is shown by ``lines``: pairs of a text, escaped here, and a style of rich."""
        from rich.text import Text

        columns, rows = self.size
        shown = [Text(escaped(text), style, no_wrap=True) for text, style in lines[:rows]]
        for text in shown:
            text.truncate(columns, overflow="ellipsis")
        self._live.update(Text("\n").join(shown), refresh=True)


@contextmanager
def full_screen() -> Iterator[Screen]:
    """Take the terminal's alternate screen, as ``less`` does; leave what was on the terminal before."""
    from rich.console import Console
    from rich.live import Live

    with Live(console=Console(highlight=False), screen=True, auto_refresh=False) as live:
        yield Screen(live)
