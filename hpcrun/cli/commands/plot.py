"""Plot loss, learning rate and throughput of one or several runs.

RUN is a run directory, a folder of them, a name in --runs-dir, or a file of
`hpcrun aggregate`. Runs that differ in their configs have the values in their
names. `hpcrun report` draws pictures, with the means of groups.

  hpcrun plot gpt-7
  hpcrun plot runs/sweep-3 --metric validation_loss
"""

import argparse
import shutil
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hpcrun.cli.arguments import add_runs_dir, runs_dir
from hpcrun.errors import UserError
from hpcrun.printing import say

if TYPE_CHECKING:
    from hpcrun.results.report.runs import ReportedRun

_MOST_RUNS = 26
_HEIGHT = 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="run directories, folders, names, or one .h5 file"
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
    """Print the plots."""
    from hpcrun.results import require

    if not 3 <= arguments.height <= 100:
        raise UserError(f"--height {arguments.height}: should be 3 to 100")
    require("report", "scipy")
    from hpcrun.results.groups import known_metrics
    from hpcrun.results.report.plotting import default_metrics, terminal_lines
    from hpcrun.results.report.runs import iterate_runs, open_results

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
    named = dict(zip(_names(runs), runs[:_MOST_RUNS], strict=False))
    lines = terminal_lines(named, metrics, width, arguments.height)
    if not lines or not metrics:
        has = (
            f"there is: {', '.join(known)}; choose with --metric"
            if known
            else "no run has a metric"
        )
        say(f"hpcrun: nothing to plot: {has}")
        return 0
    say(*lines)
    return 0


def _names(runs: Sequence["ReportedRun"]) -> list[str]:
    """Return for each run its label, and the values in which the runs differ."""
    from hpcrun.results.report.content import shown, swept_keys

    swept = swept_keys(runs)
    if len({str(run.seed) for run in runs}) > 1:
        swept = [*swept, "seed"]

    def name(run: "ReportedRun") -> str:
        values = [
            f"{key.rpartition('.')[2].lstrip('-')}={shown(run.config[key])}"
            for key in swept
            if key in run.config
        ]
        return " ".join([run.label, *values])

    return [name(run) for run in runs]
