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
import shutil
from collections.abc import Collection, Sequence

from hpcrun.api.overview import folded, overview
from hpcrun.cli.arguments import add_runs_dir, runs_dir
from hpcrun.cli.output import print_json
from hpcrun.cli.runs_table import (
    SORTS,
    STATES,
    Row,
    chosen,
    fold,
    in_order,
    period,
    table_lines,
    wanted_states,
)
from hpcrun.printing import escaped, say
from hpcrun.run.directory import RunError

_SILENT = "the scheduler does not answer; the states come from the files of the runs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "runs", nargs="*", metavar="RUN", help="names or directories of runs, or a sweep"
    )
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
    """Print a table, or JSON lines."""
    states, since = wanted_states(arguments.state), period(arguments.since)
    folder = runs_dir(arguments)
    if not arguments.runs and arguments.runs_dir is not None and not folder.is_dir():
        raise RunError(f"{folder}: no such directory; name one that holds runs with --runs-dir")
    selection = chosen(arguments.runs, folder, arguments.name, since)
    rows, answered = overview(selection.entries, whole=len(arguments.runs) == 1)
    notes = []
    # One line for each sweep of the listed runs.
    if selection.folders:
        rows = fold(rows, selection.folders)
    elif len(rows) > 1:
        for name in dict.fromkeys(row["sweep"] for row in rows if row["sweep"]):
            of_sweep = [row for row in rows if row["sweep"] == name]
            notes.append(f"{name}: {folded(name, of_sweep, folder)['says']}")
    if not answered:
        notes.append(f"hpcrun: {_SILENT}")
    rows = in_order([row for row in rows if _fits(row, states)], arguments.sort)
    if arguments.json:
        for row in rows:
            print_json(row)
    elif not rows:
        what = f"no runs are {' or '.join(sorted(states))}" if states else "there are no runs"
        fits = " that match --name and --since" if arguments.name or arguments.since else ""
        say(f"hpcrun: {what}{fits} in {folder}; `hpcrun submit` starts one")
    else:
        _print(rows, arguments)
        say(*notes)
    return 0


def _fits(row: Row, states: Collection[str] | None) -> bool:
    found = row["counts"] if row["kind"] == "sweep" else (row["state"],)
    return states is None or any(state in states for state in found)


def _print(rows: Sequence[Row], arguments: argparse.Namespace) -> None:
    """Print the table, and below it the texts that are too long for a cell."""
    # 80 columns in a pipe, unless $COLUMNS says otherwise.
    lines = table_lines(rows, shutil.get_terminal_size().columns)
    say(*lines)
    # A line for each run of a sweep would double the length of the output.
    if len(rows) == len(arguments.runs):
        reported = "\n".join(lines)
        long = [row for row in rows if escaped(str(row["says"])) not in reported]
        say(*(f"{row['name']}: {row['says']}" for row in long))
    if len(arguments.runs) == 1 and len(rows) == 1 and rows[0]["goodput"]["wall"]:
        say(_where_the_time_went(rows[0]))
    for key in ("replaced", "slow"):
        say(*(f"{row['name']}: {line}" for row in rows for line in row.get(key, ())))
    say(*(f"{row['name']}: doctor: {row['diagnosis']}" for row in rows if row.get("diagnosis")))


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
