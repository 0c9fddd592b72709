"""Where runs stand: state, step, job, and why.

Asks the scheduler once for all of them; without it, the run directories tell
what they know. Of a single run it also tells where the time went. With --json,
one object a line. Of a failed run it gives the verdict of `hpcrun doctor`.
"""

import argparse
import math
import shutil
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hpcrun.cli.outcome import last_attempt
from hpcrun.cli.output import print_json
from hpcrun.cli.runs import add_runs_dir, all_runs, runs_dir
from hpcrun.cli.verdict import verdict_line
from hpcrun.diagnose.finding import find_cause
from hpcrun.diagnose.run_lines import lines_of_attempt, nodes_of
from hpcrun.launch import jobs
from hpcrun.launch.jobs import RunState
from hpcrun.lifecycle.goodput import goodput
from hpcrun.lifecycle.history import last_committed, lives
from hpcrun.run.directory import RunDirectory, find
from hpcrun.run.events import Event, read_events
from hpcrun.run.files import read_lines

if TYPE_CHECKING:
    from rich.table import Table

_COLUMNS = ("name", "state", "step", "saved", "loss", "attempts", "job", "executor")
_KEYS = {"saved": "committed"}
_WIDE = 2000
# Of each log: many runs are to be told at once. `hpcrun doctor` reads more.
_HEAD, _TAIL, _MOST_FILES = 1 << 14, 1 << 16, 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument(
        "runs", nargs="*", metavar="RUN", help="names or directories (default: all)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a run, a line each")
    add_runs_dir(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print a table, or JSON lines."""
    folder = runs_dir(arguments)
    runs = [find(name, folder) for name in arguments.runs] or all_runs(arguments)
    rows = [_row(one, state) for one, state in zip(runs, jobs.states(runs), strict=True)]
    if arguments.json:
        for row in rows:
            print_json(row)
    elif not rows:
        print(f"hpcrun: there are no runs in {folder}; `hpcrun submit` starts one")
    else:
        _print_table(rows)
        if len(arguments.runs) == 1 and rows[0]["goodput"]["wall"]:
            print(_where_the_time_went(rows[0]))
        for row in rows:
            if row["verdict"]:
                print(f"{row['name']}: doctor: {row['verdict']}")
    return 0


def _row(run_directory: RunDirectory, state: RunState) -> dict[str, Any]:
    events = read_events(run_directory)
    lines = read_lines(run_directory.metrics)
    last = lines[-1:]
    losses = [line["loss"] for line in reversed(lines) if "loss" in line][:1]
    begun = events[0].time if events else time.time()
    return {
        "name": run_directory.name,
        "state": state.word,
        "step": last[0].get("step") if last else None,
        "committed": last_committed(events),
        # A loss that is not finite is null in the file, and here again with --json.
        "loss": (math.nan if losses[0] is None else losses[0]) if losses else None,
        "job": state.job,
        "executor": state.executor,
        "attempts": len(lives(events)),
        "age_seconds": round(time.time() - begun),
        "goodput": goodput(events, time.time()).as_record(),
        "detail": state.detail,
        "verdict": _verdict(run_directory, events) if state.word == "failed" else None,
        "directory": str(run_directory.path),
    }


def _verdict(run_directory: RunDirectory, events: Sequence[Event]) -> str | None:
    """The doctor's verdict on the newest attempt; None where the logs show no cause."""
    attempt = last_attempt(run_directory)
    if attempt is None:
        return None
    lines = lines_of_attempt(
        run_directory, attempt, events, head=_HEAD, tail=_TAIL, most_files=_MOST_FILES
    )
    try:
        found = find_cause(lines, nodes_of(events, attempt))
    except OSError:
        return None
    return verdict_line(found) if found and found.confidence != "low" else None


def _print_table(rows: list[dict[str, Any]]) -> None:
    """One line a run; where the details do not fit beside it, they follow below, whole."""
    from rich.cells import cell_len

    lines = _table_lines(rows, [*_COLUMNS, "detail"])
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else _WIDE
    if max(map(cell_len, lines)) <= columns:
        print("\n".join(lines))
        return
    print("\n".join(_table_lines(rows, _COLUMNS)))
    for row in rows:
        if row["detail"]:
            print(f"{row['name']}: {row['detail']}")


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
    console = Console(width=_WIDE, color_system=None)
    with console.capture() as captured:
        console.print(_table(rows, keys))
    return [line.rstrip() for line in captured.get().splitlines()]


def _table(rows: list[dict[str, Any]], keys: Sequence[str]) -> "Table":
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for key in keys:
        number = key in ("step", "saved", "loss", "attempts")
        table.add_column(key, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(_shown(row[_KEYS.get(key, key)])) for key in keys))
    return table


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4f}" if isinstance(value, float) else str(value)
