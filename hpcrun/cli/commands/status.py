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
from collections.abc import Sequence
from types import FrameType

from hpcrun.api.overview import Overview, folded
from hpcrun.cli.arguments import add_runs_dir, runs_dir
from hpcrun.cli.output import print_json
from hpcrun.cli.runs_table import (
    STATES,
    Row,
    chosen,
    fold,
    table_lines,
    wanted_states,
)
from hpcrun.errors import UserError
from hpcrun.exit_codes import TERMINATED
from hpcrun.printing import escaped, full_screen, say, say_styled
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
    add_runs_dir(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print a table, or JSON lines, or watch the table."""
    table = _Table(arguments)
    if arguments.watch:
        if arguments.json:
            raise UserError("--watch --json: give one of them; --json prints once")
        if not sys.stdout.isatty() or os.environ.get("TERM", "dumb") == "dumb":
            raise UserError(
                "--watch: needs a terminal that can be redrawn; without --watch the table is printed once"
            )
        return _watch(table)
    rows = table.look()
    if arguments.json:
        for row in rows:
            print_json(row)
    elif not rows:
        say(f"hpcrun: {table.none}; `hpcrun submit` starts one")
    else:
        _print(rows, arguments)
        say(*table.notes)
    return 0


class _Table:
    """The rows that the arguments select, read again for each display; ``notes``: the lines below them."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments, self._folder = arguments, runs_dir(arguments)
        self.states = wanted_states(arguments.state)
        if not arguments.runs and arguments.runs_dir is not None and not self._folder.is_dir():
            raise RunError(
                f"{self._folder}: no such directory; name one that holds runs with --runs-dir"
            )
        self._overview = Overview(())
        self.notes: list[str] = []

    @property
    def none(self) -> str:
        """The words for a table without rows."""
        states = " or ".join(sorted(self.states or ()))
        return f"{f'no runs are {states}' if states else 'there are no runs'} in {self._folder}"

    def look(self) -> list[Row]:
        """Return the rows, filtered and folded."""
        self._overview.entries = chosen(self._arguments.runs, self._folder)
        found = self._overview.look()
        rows: list[Row] = [*found]
        self.notes = []
        # One line for each sweep of the listed runs.
        if not self._arguments.runs:
            rows = fold(found, self._folder)
        elif len(rows) > 1:
            sweeps = dict.fromkeys(row["sweep"] for row in found if row["sweep"])
            for name in sweeps:
                of_sweep = [row for row in found if row["sweep"] == name]
                self.notes.append(f"{name}: {folded(name, of_sweep, self._folder)['says']}")
        if not self._overview.answered:
            self.notes.append(f"hpcrun: {_SILENT}")
        return [row for row in rows if self._fits(row)]

    def _fits(self, row: Row) -> bool:
        found = row["counts"] if row["kind"] == "sweep" else (row["state"],)
        return self.states is None or any(state in self.states for state in found)


def _print(rows: Sequence[Row], arguments: argparse.Namespace) -> None:
    """Print the table, and below it the texts that are too long for a cell."""
    # 80 columns in a pipe, unless $COLUMNS says otherwise.
    lines = table_lines(rows, shutil.get_terminal_size().columns)
    styles = ["bold", *(_STYLES.get(row["state"], "") for row in rows)]
    say_styled(*zip(lines, styles, strict=True))
    reported = "\n".join(lines)
    long = [row for row in rows if escaped(str(row["says"])) not in reported]
    # A line for each run of a sweep would double the length of the output.
    if len(rows) != len(arguments.runs):
        long = [row for row in long if _needs_a_person(row)][:_MOST_LONG]
    say(*(f"{row['name']}: {row['says']}" for row in long))
    if len(arguments.runs) == 1 and len(rows) == 1 and rows[0]["goodput"]["wall"]:
        say(_where_the_time_went(rows[0]))
    for key in ("replaced", "slow"):
        say(*(f"{row['name']}: {line}" for row in rows for line in row.get(key, ())))
    say(*(f"{row['name']}: doctor: {row['diagnosis']}" for row in rows if row.get("diagnosis")))


# Lines below a table of many runs.
_MOST_LONG = 20


def _needs_a_person(row: Row) -> bool:
    stuck = str(row["says"]).startswith("stuck")
    return stuck or (row["kind"] == "run" and row["state"] in ("failed", "lost", "unreadable"))


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
_LIVE = ("running", "suspended", "pending")


def _watch(table: _Table) -> int:
    """Show the table until Ctrl-C; return 0."""

    def leave(_number: int, _frame: FrameType | None) -> None:
        # With an exception the terminal is restored.
        sys.exit(TERMINATED)

    signal.signal(signal.SIGTERM, leave)
    with full_screen() as screen, contextlib.suppress(KeyboardInterrupt):
        while True:
            begun = time.monotonic()
            rows = sorted(table.look(), key=_place)
            slow = any(row["executor"] == "slurm" for row in rows)
            every = _EVERY_SLURM if slow else _EVERY_LOCAL
            every = max(every, _SHARE * (time.monotonic() - begun))
            now = time.strftime("%H:%M:%S")
            none = "" if rows else f"{table.none}; "
            footer = f"{none}{now}, every {every:.0f} s; Ctrl-C ends the watching, not the runs"
            drawn, until = None, time.monotonic() + every
            while time.monotonic() < until:
                # Again when the terminal's size changes.
                if screen.size != drawn:
                    drawn = screen.size
                    screen.show(_page(rows, table.notes, footer, *drawn))
                time.sleep(0.2)
    return 0


def _place(row: Row) -> int:
    """Return a key that sorts live runs first: a screen may show a tenth of a sweep."""
    return _LIVE.index(row["state"]) if row["state"] in _LIVE else len(_LIVE)


def _page(
    rows: Sequence[Row], notes: list[str], footer: str, columns: int, lines: int
) -> list[tuple[str, str]]:
    """Return the lines of one screen; the last line counts the rows that do not fit."""
    heading, *table = table_lines(rows, columns)
    styles = [_STYLES.get(row["state"], "") for row in rows]
    room = max(1, lines - 2 - len(notes))
    page = [(heading, "bold"), *zip(table[:room], styles, strict=False)]
    if len(table) > room:
        more = f"… {len(table) - room + 1} more: choose with names or --state"
        page[-1] = (more, "dim")
    return [*page, *((note, "dim") for note in notes), (footer, "dim")]
