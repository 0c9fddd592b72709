"""Collect runs into one HDF5 file, results.h5.

RUN is a run directory, a folder of them, or a name in --runs-dir (default: all
runs there). A second call reads only what has changed. Runs may train in the
meantime: an unfinished last line waits for the next call. Damaged lines and
files are named, and everything else is kept.

  hpcrun aggregate runs/sweep-* -o results.h5
  hpcrun aggregate runs --format parquet
  hpcrun aggregate other-runs --map mapping.yaml -o results.h5
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from hpcrun.cli.arguments import add_runs_dir, runs_dir
from hpcrun.cli.output import plural, print_json
from hpcrun.errors import UserError
from hpcrun.printing import progress_bar, say

if TYPE_CHECKING:
    from hpcrun.results.collect.aggregate import RunSource, Summary

_MOST_PROBLEMS = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "runs", nargs="*", metavar="RUN", help="run directories, folders of them, or names"
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("results.h5"),
        metavar="FILE",
        help="the file to write or bring up to date (default: results.h5)",
    )
    parser.add_argument(
        "--map",
        type=Path,
        metavar="FILE",
        help="read another program's runs; FILE maps their files",
    )
    parser.add_argument(
        "--format",
        choices=("csv", "parquet"),
        help="also write tables, in a folder such as results-parquet (needs pandas and pyarrow)",
    )
    parser.add_argument(
        "--fresh", action="store_true", help="read everything, and drop the runs of earlier calls"
    )
    parser.add_argument(
        "--processes",
        type=int,
        metavar="N",
        help="processes that read (default: up to 4, for 300 runs and more)",
    )
    parser.add_argument("--json", action="store_true", help="print the summary as one JSON object")
    add_runs_dir(parser)


def run(arguments: argparse.Namespace) -> int:
    """Write the file and print a summary."""
    from hpcrun.results import require
    from hpcrun.results.collect.aggregate import aggregate

    if arguments.processes is not None and not 0 <= arguments.processes <= 64:
        raise UserError(f"--processes {arguments.processes}: should be 0 to 64")
    if arguments.format is not None:
        require("tables", "pandas", *(["pyarrow"] if arguments.format == "parquet" else []))
    source = _source(arguments)
    with progress_bar("run") as bar:
        summary = aggregate(
            source,
            arguments.output.absolute(),
            fresh=arguments.fresh,
            processes=arguments.processes,
            progress=bar.move,
        )
    tables = None
    if arguments.format is not None:
        from hpcrun.results.frames import write_tables

        tables = str(write_tables(arguments.output, arguments.format))
    if arguments.json:
        print_json(
            {
                "file": str(summary.path),
                "runs": sum(summary.states.values()),
                "states": dict(summary.states),
                "read": summary.read,
                "unchanged": summary.unchanged,
                "rows": summary.rows,
                "kept": summary.kept,
                "problems": [
                    {"run": run, "file": name, "problem": what}
                    for run, name, what in summary.problems
                ],
                "tables": tables,
            }
        )
        return 0
    _print(summary, arguments.output)
    if tables:
        say(f"  tables: {tables}")
    return 0


def _source(arguments: argparse.Namespace) -> "RunSource":
    from hpcrun.results.collect.aggregate import RunSource
    from hpcrun.results.collect.run_reader import find_runs

    folder = runs_dir(arguments)
    named = arguments.runs or [str(folder)]
    if arguments.map is not None:
        from hpcrun.results.collect.mapping import mapped_source, read_mapping

        return mapped_source(read_mapping(arguments.map), named, folder)
    return RunSource(find_runs(named, folder))


def _print(summary: "Summary", output: Path) -> None:
    states = ", ".join(f"{count:,} {state}" for state, count in sorted(summary.states.items()))
    runs = plural(sum(summary.states.values()), "run")
    say(f"{output}: {runs} ({states}), {plural(summary.rows, 'row')} of metrics")
    written = "" if summary.written else "; the file is unchanged"
    say(f"  read {summary.read:,}, unchanged {summary.unchanged:,}{written}")
    if summary.kept:
        away = sum(not Path(path).is_dir() for path in summary.kept)
        lost = f", {away:,} of them without a directory (--fresh drops these)" if away else ""
        say(f"  kept {plural(len(summary.kept), 'run')} of earlier calls{lost}")
    if summary.problems:
        problems = plural(len(summary.problems), "problem")
        say(f"  {problems}; the rest of these runs is in the file:")
    for path, name, what in summary.problems[:_MOST_PROBLEMS]:
        say(f"    {path}/{name}: {what}")
    if len(summary.problems) > _MOST_PROBLEMS:
        more = len(summary.problems) - _MOST_PROBLEMS
        say(f"    … {more:,} more in the table `problems`, or with --json")
