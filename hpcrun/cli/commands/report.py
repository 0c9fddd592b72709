"""Write one HTML file about many runs, which opens without a network.

RUN is a run directory, a folder of them, a name in --runs-dir, or a file of
`hpcrun aggregate` (default: all runs in --runs-dir). The report has results
by config, curves with bands over seeds, throughput, goodput, timelines, and the
ends of attempts and runs.

  hpcrun report runs/sweep-7 -o report.html
  hpcrun report results.h5 --metric accuracy --figures figures
"""

import argparse
import time
from pathlib import Path

from hpcrun.cli.arguments import add_comparison, add_runs_dir, keys, require_moment, runs_dir
from hpcrun.printing import say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "runs", nargs="*", metavar="RUN", help="run directories, folders, names, or one .h5 file"
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("report.html"),
        metavar="FILE",
        help="the file to write (default: report.html)",
    )
    parser.add_argument(
        "--figures", type=Path, metavar="FOLDER", help="also write each figure as PNG and PDF"
    )
    parser.add_argument("--title", metavar="TEXT", help="title of the page")
    add_comparison(parser)
    add_runs_dir(parser)


def run(arguments: argparse.Namespace) -> int:
    """Write the report."""
    from hpcrun.results import require

    require_moment(arguments.at)
    require("report", "jinja2", "matplotlib", "pandas", "scipy")
    from hpcrun.results.report.content import ReportRequest
    from hpcrun.results.report.page import require_place, write_figures, write_report
    from hpcrun.results.report.runs import open_results

    require_place(arguments.output, arguments.figures)
    request = ReportRequest(
        title=arguments.title,
        metric=arguments.metric,
        goal=arguments.goal,
        at=arguments.at,
        by=keys(arguments.by),
        seed_key=arguments.seed_key,
    )
    begin = time.monotonic()
    with open_results(arguments.runs, runs_dir(arguments)) as store:
        figures, words = write_report(store, request, arguments.output)
    files = write_figures(figures, arguments.figures) if arguments.figures else []
    say(f"{arguments.output}: {words} ({time.monotonic() - begin:.0f} s)")
    if files:
        say(f"  {arguments.figures}: {len(files)} files")
    return 0
