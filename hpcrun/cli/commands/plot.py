"""Plot loss, learning rate, throughput and goodput of one or several runs.

RUN is a run directory, a folder of them, a name in --runs-dir, or a file of
`hpcrun aggregate`. The plots go to the terminal; with -o also into a file.

  hpcrun plot gpt-7
  hpcrun plot runs/sweep-3 --metric validation_loss -o sweep-3.pdf
"""

import argparse
import shutil
from pathlib import Path

from hpcrun.cli.arguments import add_runs_dir, runs_dir
from hpcrun.errors import UserError
from hpcrun.printing import say

_MOST_RUNS = 26
_HEIGHT = 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="run directories, folders, names, or one .h5 file"
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="also write FILE: .png, .pdf or .svg"
    )
    parser.add_argument(
        "--metric",
        action="append",
        metavar="NAME",
        help="a metric to plot (may be repeated; default: losses, lr, throughput)",
    )
    parser.add_argument(
        "--height", type=int, default=_HEIGHT, metavar="N", help="lines of each plot (default: 12)"
    )
    add_runs_dir(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the plots, and write the file."""
    from hpcrun.results import require

    if not 3 <= arguments.height <= 100:
        raise UserError(f"--height {arguments.height}: should be 3 to 100")
    require("report", "matplotlib")
    from hpcrun.results.groups import known_metrics
    from hpcrun.results.report.plotting import (
        default_metrics,
        require_place,
        save_plot,
        terminal_lines,
    )
    from hpcrun.results.report.runs import iterate_runs, open_results

    if arguments.output is not None:
        require_place(arguments.output)
    with open_results(arguments.runs, runs_dir(arguments)) as store:
        known = known_metrics(store)
        runs = list(iterate_runs(store))
    unknown = [name for name in arguments.metric or () if name not in known]
    if unknown:
        raise UserError(
            f"--metric {unknown[0]}: no run has it; there is: {', '.join(known) or 'none'}"
        )
    metrics = arguments.metric or default_metrics(runs)
    width = shutil.get_terminal_size((100, 24)).columns
    if len(runs) > _MOST_RUNS:
        say(
            f"{len(runs)} runs: the terminal shows the first {_MOST_RUNS}; `hpcrun report` shows all"
        )
    say(*terminal_lines(runs[:_MOST_RUNS], metrics, width, arguments.height))
    if arguments.output is not None:
        save_plot(runs, metrics, arguments.output)
        say(f"{arguments.output}: {len(runs)} run{'s' * (len(runs) > 1)}")
    return 0
