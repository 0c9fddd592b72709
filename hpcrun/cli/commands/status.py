"""Show the state of runs: state, step, job, and why.

Asks the scheduler once for all of them; without it, the run directories show
what they contain. `last` is the age of the newest line of metrics. Of one run
it also shows where the time went. With --json, one object a line.
Of a failed run it gives the verdict of `hpcrun doctor`.
"""

import argparse
import shutil
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hpcrun.api.standing import row_of
from hpcrun.cli.output import print_json
from hpcrun.cli.run_arguments import add_runs_dir, all_runs, runs_dir
from hpcrun.launch import jobs
from hpcrun.printing import escaped, say
from hpcrun.run.directory import find

if TYPE_CHECKING:
    from rich.table import Table

_COLUMNS = ("name", "state", "step", "saved", "loss", "last", "attempts", "job", "executor")
_KEYS = {"saved": "committed", "last": "progress_seconds"}
_STATES = ("new", "pending", "running", "suspended", "finished", "stopped", "failed", "lost")
_WIDE = 2000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument(
        "runs", nargs="*", metavar="RUN", help="names or directories (default: all)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a run, a line each")
    parser.add_argument(
        "--state",
        choices=_STATES,
        metavar="STATE",
        help=f"only the runs in this state: {', '.join(_STATES)}",
    )
    add_runs_dir(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print a table, or JSON lines."""
    folder = runs_dir(arguments)
    runs = [find(name, folder) for name in arguments.runs] or all_runs(arguments)
    found = zip(runs, jobs.states(runs), strict=True)
    wanted: str | None = arguments.state
    rows = [row_of(one, state) for one, state in found if wanted in (None, state.word)]
    if arguments.json:
        for row in rows:
            print_json(row)
    elif not rows:
        what = f"no runs are {wanted}" if wanted and runs else "there are no runs"
        say(f"hpcrun: {what} in {folder}; `hpcrun submit` starts one")
    else:
        _print_table(rows)
        if len(arguments.runs) == 1 and rows[0]["goodput"]["wall"]:
            say(_where_the_time_went(rows[0]))
        say(*(f"{row['name']}: doctor: {row['verdict']}" for row in rows if row["verdict"]))
    return 0


def _print_table(rows: list[dict[str, Any]]) -> None:
    """One line a run; details that do not fit into it are printed before the table."""
    from rich.cells import cell_len

    lines = _table_lines(rows, [*_COLUMNS, "detail"])
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else _WIDE
    if max(map(cell_len, lines)) <= columns:
        say(*lines)
        return
    # The table is last, so that it stays visible below many details.
    say(*(f"{row['name']}: {row['detail']}" for row in rows if row["detail"]))
    say(*_table_lines(rows, _COLUMNS))


def _where_the_time_went(row: dict[str, Any]) -> str:
    """One line: the parts of the wall time that are not empty, and the productive share."""
    account = dict(row["goodput"])
    ratio, wall = account.pop("ettr"), account.pop("wall")
    parts = [
        f"{name.replace('_', '-')} {_duration(value)}" for name, value in account.items() if value
    ]
    share = "" if ratio is None else f"; productive share (ETTR) {100 * ratio:.0f} %"
    return f"{row['name']}: {_duration(wall)} since submission: {', '.join(parts)}{share}"


def _duration(seconds: float) -> str:
    """As ``42.1 s``, ``12:05 min`` or ``3:04:05 h``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02} h" if hours else f"{minutes}:{rest:02} min"


def _table_lines(rows: list[dict[str, Any]], keys: Sequence[str]) -> list[str]:
    from rich.console import Console

    # The terminal wraps a line that is too long; rich would cut every column to make it fit.
    console = Console(width=_WIDE, color_system=None, force_terminal=False)
    with console.capture() as captured:
        console.print(_table(rows, keys))
    return [line.rstrip() for line in captured.get().splitlines()]


def _table(rows: list[dict[str, Any]], keys: Sequence[str]) -> "Table":
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for key in keys:
        number = key in ("step", "saved", "loss", "last", "attempts")
        table.add_column(key, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(escaped(_cell(key, row[_KEYS.get(key, key)]))) for key in keys))
    return table


def _cell(key: str, value: Any) -> str:
    if key == "last" and value is not None:
        return f"{_age(value)} ago"
    return _shown(value)


def _age(seconds: float) -> str:
    """Return the largest unit: ``42 s``, ``5 min``, ``3 h``, ``12 d``."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4f}" if isinstance(value, float) else str(value)
