"""`hpcrun status --watch`: the table of runs on a whole terminal, redrawn until Ctrl-C."""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType

from hpcrun.cli.runs_table import Row, table_lines
from hpcrun.errors import UserError
from hpcrun.printing import Screen, full_screen

# Seconds between two reads. Slurm's controller and the file server serve all users.
_EVERY_LOCAL, _EVERY_SLURM = 2.0, 10.0
# A read of thousands of runs may take seconds: the pause is long enough that reads use a tenth of the time.
_SHARE = 10
_STYLES = {
    "running": "green",
    "failed": "red",
    "lost": "red",
    "unreadable": "red",
    "pending": "yellow",
    "suspended": "yellow",
}
# 128 + SIGTERM.
_TERMINATED = 143


def require_terminal(environ: Mapping[str, str] = os.environ) -> None:
    """Raise UserError if the output is not a terminal that can be redrawn."""
    if not sys.stdout.isatty() or environ.get("TERM", "dumb") == "dumb":
        raise UserError(
            "--watch: needs a terminal that can be redrawn; without --watch the table is printed once"
        )


def watch(look: Callable[[], tuple[Sequence[Row], list[str]]]) -> int:
    """Show the result of ``look`` (rows, and notes below them) until Ctrl-C; return 0."""
    with _terminated(), full_screen() as screen:
        try:
            while True:
                begun = time.monotonic()
                rows, notes = look()
                now = time.monotonic()
                every = max(_interval(rows), _SHARE * (now - begun))
                _wait(screen, rows, notes, now + every, every)
        except KeyboardInterrupt:
            return 0


def _wait(
    screen: Screen, rows: Sequence[Row], notes: list[str], until: float, every: float
) -> None:
    """Draw immediately, and again when the terminal's size changes, until the next read is due."""
    drawn = None
    footer = (
        f"{time.strftime('%H:%M:%S')}, every {every:.0f} s; Ctrl-C ends the watching, not the runs"
    )
    while time.monotonic() < until:
        if screen.size != drawn:
            drawn = screen.size
            screen.show(_page(rows, notes, footer, *drawn))
        time.sleep(0.2)


def _page(
    rows: Sequence[Row], notes: list[str], footer: str, columns: int, lines: int
) -> list[tuple[str, str]]:
    """Return the lines of one screen; the last line counts the rows that do not fit."""
    heading, *table = table_lines(rows, columns)
    styles = [_STYLES.get(row["state"], "") for row in rows]
    room = max(1, lines - 2 - len(notes))
    page = [(heading, "bold"), *zip(table[:room], styles, strict=False)]
    if len(table) > room:
        more = f"… {len(table) - room + 1} more: choose with --state, --name or --since"
        page[-1] = (more, "dim")
    return [*page, *((note, "dim") for note in notes), (footer, "dim")]


def _interval(rows: Sequence[Row]) -> float:
    on_slurm = any(row.get("executor") == "slurm" for row in rows)
    return _EVERY_SLURM if on_slurm or any(row["kind"] == "sweep" for row in rows) else _EVERY_LOCAL


@contextlib.contextmanager
def _terminated() -> Iterator[None]:
    """Let SIGTERM end the block with an exception, so that the terminal is restored."""

    def leave(_number: int, _frame: FrameType | None) -> None:
        sys.exit(_TERMINATED)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
