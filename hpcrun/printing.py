"""Text output for people: no other module prints to a terminal.

A task, a script, a node or a file may contain anything: escape sequences that clear the screen or write to
the clipboard, line breaks that forge a line, marks that reverse a text. Here, all of it is only data.
This base module may be imported by every package.
"""

import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.live import Live
    from tqdm import tqdm

Progress = Callable[[int, int], None]
"""Function that gets what is done, and the total."""

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


def make_printable() -> None:
    """Print characters that the terminal's encoding lacks as escapes, instead of failing."""
    for output in (sys.stdout, sys.stderr):
        if hasattr(output, "reconfigure"):
            output.reconfigure(errors="backslashreplace")


def say(*lines: str, stream: TextIO | None = None) -> None:
    """Print each of ``lines``, escaped, on a separate line.

    Args:
        stream: standard output by default.

    Raises:
        OSError: the stream cannot be written.
    """
    text = "".join(f"{escaped(line)}\n" for line in lines)
    print(text, end="", file=stream, flush=True)


_CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33"}


def say_styled(*lines: tuple[str, str]) -> None:
    """Print pairs of a line and its style, as :func:`say` does; a terminal shows the styles.

    The environment variable ``NO_COLOR`` (no-color.org) turns them off.
    """
    plain = not sys.stdout.isatty() or os.environ.get("TERM", "dumb") == "dumb"
    if plain or os.environ.get("NO_COLOR"):
        say(*(line for line, _ in lines))
        return
    text = "".join(
        f"\x1b[{_CODES[style]}m{escaped(line)}\x1b[0m\n" if style else f"{escaped(line)}\n"
        for line, style in lines
    )
    print(text, end="", flush=True)


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


# The terminal's echo of Ctrl-C would push a full line over the edge and leave half a bar on the screen.
_ECHO = 3

BAR_DELAY = 0.5
"""Seconds before the bar of bytes appears: most reads are quicker."""


def draws_bars() -> bool:
    """Return True if standard error is a terminal that can move its cursor."""
    return sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def bar_columns() -> int | None:
    """Return the columns of a bar on standard error; None if the terminal does not give its width."""
    try:
        return max(os.get_terminal_size(sys.stderr.fileno()).columns - _ECHO, 20)
    except OSError:
        return None


class ProgressBar:
    """A bar that :func:`progress_bar` opens. Any thread may move it."""

    def __init__(self, bar: "tqdm[Any] | None") -> None:
        self._bar, self._lock = bar, threading.Lock()

    @property
    def drawn(self) -> bool:
        """True on a terminal."""
        return self._bar is not None

    def move(self, done: int, total: int | None = None) -> None:
        """Show that ``done`` of ``total`` are done; None: the total is unknown."""
        if self._bar is not None:
            with self._lock:
                self._bar.total, self._bar.ncols = total, bar_columns()
                self._bar.update(done - self._bar.n)

    def describe(self, text: str) -> None:
        """Show ``text`` in front of the bar."""
        if self._bar is not None:
            with self._lock:
                self._bar.set_description(escaped(text))

    def say(self, *lines: str, stream: TextIO | None = None) -> None:
        """Print like :func:`say`, above the bar."""
        if self._bar is None:
            say(*lines, stream=stream)
            return
        with self._lock, self._bar.external_write_mode(file=stream or sys.stdout):
            say(*lines, stream=stream)


@contextmanager
def progress_bar(unit: str, *, text: str = "", delay: float = 0.0) -> Iterator[ProgressBar]:
    """Show a bar on standard error during the block; nothing if that is no terminal.

    The bar disappears at the end of the block, also after Ctrl-C.

    Args:
        unit: name of one step; ``B`` shows bytes in decimal units.
        text: text in front of the bar.
        delay: seconds before the bar appears, for work that is quick most of the time.
    """
    if not draws_bars():
        yield ProgressBar(None)
        return
    # This import takes a tenth of the time of a command that has nothing to do.
    from tqdm import tqdm

    with tqdm(
        desc=escaped(text) or None,
        unit=unit,
        unit_scale=unit == "B",
        file=sys.stderr,
        ncols=bar_columns(),
        leave=False,
        delay=delay,
        # Otherwise tqdm skips calls after a quick one, and the bar does not move.
        miniters=0,
    ) as bar:
        yield ProgressBar(bar)
