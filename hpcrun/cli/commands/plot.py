"""Plot loss, learning rate and throughput of one or several runs.

RUN is a run directory, a folder of them, a name in --runs-dir, or a file of
`hpcrun aggregate`. Runs that differ in their configs have the values in their
names. With --by there is one curve for each value of a key: the mean of the
finished runs, or of all runs if none has finished. `hpcrun report` draws
pictures.

  hpcrun plot gpt-7
  hpcrun plot runs/sweep-3 --by train.lr --metric validation_loss
"""

import argparse
import shutil
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hpcrun.cli.arguments import add_runs_dir, keys, runs_dir
from hpcrun.errors import UserError
from hpcrun.printing import say

if TYPE_CHECKING:
    from hpcrun.results.report.plotting import Series
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
        "--by", metavar="KEYS", help="a curve for each value of these keys of the config"
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
    by = keys(arguments.by)
    series = _named(runs) if by is None else _by(runs, by)
    width = shutil.get_terminal_size((100, 24)).columns
    if len(series) > _MOST_RUNS:
        what = "runs: the terminal shows" if by is None else "values: the terminal shows"
        say(f"{len(series)} {what} the first {_MOST_RUNS}; `hpcrun report` shows all")
    say(*terminal_lines(series[:_MOST_RUNS], metrics, width, arguments.height))
    return 0


def _named(runs: Sequence["ReportedRun"]) -> "list[Series]":
    """Return each run, named by its label and the values in which the runs differ."""
    from hpcrun.results.report.content import swept_keys
    from hpcrun.results.report.plotting import Series

    swept = swept_keys(runs)
    if len({str(run.seed) for run in runs}) > 1:
        swept = [*swept, "seed"]
    return [Series(" ".join([run.label, *_values(run.config, swept)]), [run]) for run in runs]


def _by(runs: Sequence["ReportedRun"], by: Sequence[str]) -> "list[Series]":
    """Return a series for each combination of values of ``by``, in the order of the runs."""
    from hpcrun.results.report.plotting import Series

    if not any(key in run.config for run in runs for key in by):
        raise UserError(f"--by {','.join(by)}: no run has this key in its config")
    groups: dict[str, list[ReportedRun]] = {}
    for run in runs:
        groups.setdefault(" ".join(_values(run.config, by)) or "without", []).append(run)
    return [Series(name, group) for name, group in groups.items()]


def _values(config: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """Return the values of ``names`` with the last components of the keys."""
    from hpcrun.results.report.content import shown

    return [
        f"{key.rpartition('.')[2].lstrip('-')}={shown(config[key])}"
        for key in names
        if key in config
    ]
