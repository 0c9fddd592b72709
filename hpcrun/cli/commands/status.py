"""Show runs and sweeps: state, step, loss, speed, ETA, restarts and cause.

One line for each run, and a line for a sweep; `hpcrun status SWEEP` lists its
runs. The scheduler is asked once for all of them; if it does not answer, the
table comes from the run directories. `ETA` is the time to the last step at the
current speed, `last` the age of the newest line of metrics. `goodput` is the
share of time spent on steps that were not lost in a restart. A failed run shows
the cause that `hpcrun doctor` found. A single run also shows how its time was
spent.
"""

import argparse
import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

from hpcrun.api.overview import Overview, folded
from hpcrun.cli.arguments import add_runs_dir, runs_dir
from hpcrun.cli.output import cells_wide, print_json
from hpcrun.cli.runs_table import (
    SORTS,
    STATES,
    Row,
    Selection,
    everything,
    fold,
    in_order,
    named,
    narrowed,
    period,
    table_lines,
    wanted_states,
)
from hpcrun.errors import UserError
from hpcrun.printing import Screen, escaped, full_screen, say
from hpcrun.run.directory import RunError

_SILENT = "the scheduler does not answer; the states come from the files of the runs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "runs", nargs="*", metavar="RUN", help="names or directories of runs, or a sweep"
    )
    parser.add_argument("--watch", action="store_true", help="redraw the table until Ctrl-C")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    parser.add_argument(
        "--state", metavar="STATE,…", help=f"only these states: {', '.join(STATES)}"
    )
    parser.add_argument(
        "--name", metavar="GLOB", help="only names that match, such as 'gpt-*' or 'sweep/*'"
    )
    parser.add_argument(
        "--since", metavar="TIME", help="only runs active within this time: 30m, 12h, 2d"
    )
    parser.add_argument(
        "--sort", choices=tuple(SORTS), metavar="KEY", help=f"sort by {', '.join(SORTS)}"
    )
    add_runs_dir(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print a table, or JSON lines, or watch the table."""
    wanted = wanted_states(arguments.state)
    period(arguments.since)
    if arguments.watch:
        if arguments.json:
            raise UserError("--watch --json: give one of them; --json prints once")
        require_terminal()
        table = _Table(arguments)
        return watch(lambda: (table.look(), table.notes()))
    table = _Table(arguments)
    rows = table.look()
    if arguments.json:
        for row in rows:
            print_json(row)
    elif not rows:
        what = f"no runs are {' or '.join(sorted(wanted))}" if wanted else "there are no runs"
        fits = " that match --name and --since" if arguments.name or arguments.since else ""
        say(f"hpcrun: {what}{fits} in {runs_dir(arguments)}; `hpcrun submit` starts one")
    else:
        _print(rows, arguments)
        say(*table.notes())
    return 0


class _Table:
    """The rows that the arguments select, read again for each display."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._states = wanted_states(arguments.state)
        self._since = period(arguments.since)
        self._selection = self._selected()
        self._overview = Overview(self._selection.entries, whole=len(arguments.runs) == 1)
        self._notes: list[str] = []
        self._looked = False

    def look(self) -> list[dict[str, Any]]:
        """Return the rows, filtered, folded and sorted."""
        if self._looked and not self._arguments.runs:
            self._look_for_new_runs()
        self._looked = True
        rows = self._overview.look()
        self._notes = [] if self._overview.answered else [f"hpcrun: {_SILENT}"]
        self._notes = [*self._sums(rows), *self._notes]
        if self._selection.folders:
            rows = [row for row in fold(rows, self._selection.folders) if self._fits(row)]
        else:
            rows = [row for row in rows if self._fits(row)]
        return in_order(rows, self._arguments.sort)

    def notes(self) -> list[str]:
        """Return the lines below the table of the last read."""
        return self._notes

    def _fits(self, row: dict[str, Any]) -> bool:
        if self._states is None:
            return True
        found = row["counts"] if row["kind"] == "sweep" else (row["state"],)
        return any(state in self._states for state in found)

    def _sums(self, rows: Sequence[dict[str, Any]]) -> list[str]:
        """Yield one line for each sweep of the listed runs."""
        sweeps: dict[str, list[dict[str, Any]]] = {}
        for row in rows:
            if row["sweep"] and row["sweep"] not in self._selection.folders:
                sweeps.setdefault(row["sweep"], []).append(row)
        one_run = len(rows) == 1
        return [
            f"{name}: {folded(name, found, runs_dir(self._arguments))['says']}"
            for name, found in sweeps.items()
            if not one_run
        ]

    def _selected(self) -> Selection:
        folder = runs_dir(self._arguments)
        if self._arguments.runs:
            chosen = named(self._arguments.runs, folder)
        else:
            if self._arguments.runs_dir is not None and not folder.is_dir():
                raise RunError(
                    f"{folder}: no such directory; name one that holds runs with --runs-dir"
                )
            chosen = everything(folder)
        return narrowed(chosen, self._arguments.name, self._since)

    def _look_for_new_runs(self) -> None:
        self._selection = self._selected()
        self._overview.entries = self._selection.entries


def _print(rows: Sequence[Row], arguments: argparse.Namespace) -> None:
    """Print the table, and below it the texts that are too long for a cell."""
    # 80 columns in a pipe, unless $COLUMNS says otherwise.
    lines = table_lines(rows, shutil.get_terminal_size().columns)
    say(*lines)
    # A line for each run of a sweep would double the length of the output.
    if len(rows) == len(arguments.runs):
        say(*(f"{row['name']}: {row['says']}" for row in rows if _is_cut(row, lines)))
    if len(arguments.runs) == 1 and len(rows) == 1 and rows[0]["goodput"]["wall"]:
        say(_where_the_time_went(rows[0]))
    say(*(f"{row['name']}: doctor: {row['diagnosis']}" for row in rows if row.get("diagnosis")))


def _is_cut(row: Row, lines: Sequence[str]) -> bool:
    text = escaped(str(row["says"]))
    return not any(text in line for line in lines) and cells_wide(text) > 0


def _where_the_time_went(row: Row) -> str:
    """Print one line: the parts of the wall time above zero, and the productive share."""
    account = dict(row["goodput"])
    ratio, wall = account.pop("ettr"), account.pop("wall")
    parts = [
        f"{name.replace('_', '-')} {_duration(value)}" for name, value in account.items() if value
    ]
    share = "" if ratio is None else f"; productive share (ETTR) {100 * ratio:.0f} %"
    return f"{row['name']}: {_duration(wall)} since submission: {', '.join(parts)}{share}"


def _duration(seconds: float) -> str:
    """Return seconds as ``42.1 s``, ``12:05 min`` or ``3:04:05 h``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02} h" if hours else f"{minutes}:{rest:02} min"


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
