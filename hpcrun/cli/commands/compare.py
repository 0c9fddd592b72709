"""Compare the configs in results.h5 over their seeds.

Runs with the same config form a group. Differences in seed, job, restarts,
checkpoint and watch are ignored. Only finished runs count; other
runs are listed. The best group is first. The second table compares the others
with it: over common seeds, or all runs if the groups have other seeds.

  hpcrun compare results.h5
  hpcrun compare results.h5 --metric validation_loss --by train.lr --at best
  hpcrun compare results.h5 --against 2 --json
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcrun.cli.arguments import add_comparison, keys, require_moment
from hpcrun.cli.output import aligned, print_json
from hpcrun.errors import UserError
from hpcrun.printing import say

if TYPE_CHECKING:
    from hpcrun.results.groups import RunGroup
    from hpcrun.results.statistics import ConfidenceInterval, ConfigDifference, Spread

_MOST_LISTED, _MOST_SEEDS = 20, 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("file", metavar="FILE", type=Path, help="a file of `hpcrun aggregate`")
    add_comparison(parser)
    parser.add_argument(
        "--against", type=int, metavar="ROW", help="the row to compare with (default: the best)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Print the tables."""
    from hpcrun.results import require
    from hpcrun.results.groups import (
        BEST_IS_BIASED,
        Question,
        default_metric,
        grouped,
        labels,
        lower_is_better,
    )

    require_moment(arguments.at)
    require("report", "scipy")
    import numpy as np

    from hpcrun.results.statistics import compare_all, describe
    from hpcrun.results.store import ResultsFile

    with ResultsFile(arguments.file) as store:
        metric = arguments.metric or default_metric(store)
        goal = arguments.goal or ("min" if lower_is_better(metric) else "max")
        question = Question(
            metric=metric,
            at=arguments.at,
            lower=goal == "min",
            seed_key=arguments.seed_key,
            by=keys(arguments.by),
        )
        groups = grouped(store, question)
        known = labels(store)
    full = sum(bool(group.values) for group in groups)
    if arguments.against is not None and not 1 <= arguments.against <= full:
        raise UserError(
            f"--against {arguments.against}: no run of such a row counts; choose a row from 1 to {full}"
        )
    base = None if arguments.against is None else arguments.against - 1
    # A diverged loss of 1e308 has an infinite variance.
    with np.errstate(all="ignore"):
        spreads = [describe(group.numbers()) if group.values else None for group in groups]
        values = [{one.pair: one.value for one in group.values} for group in groups]
        found, tests = compare_all(values, base, lower=question.lower)
    if arguments.json:
        print_json(_as_data(question, groups, spreads, found, (base or 0) + 1, tests))
        return 0
    at = f"at step {arguments.at}" if arguments.at.isdigit() else arguments.at
    say(f"{metric} ({at}, {goal} is best), 95% intervals")
    say(*aligned(_group_rows(groups, spreads, question.lower), range(6)))
    if question.at == "best":
        say(f"caution: {BEST_IS_BIASED}")
    steps = sorted({one.step for group in groups for one in group.values if one.step >= 0})
    if question.at == "last" and len(steps) > 1:
        say(
            f"caution: the last values are of different steps, {steps[0]} to {steps[-1]}; --at {steps[0]} "
            "compares at one step"
        )
    if not any(group.known for group in groups):
        say("no run has a config, so the runs form one group")
    if any(found):
        say("", *_best(groups, found if base is None else [], question.lower))
        say("", f"difference to row {(base or 0) + 1}")
        say(*aligned(_pair_rows(groups, found), range(5)))
        if tests > 1:
            pairs = "of all rows" if base is None else f"with row {base + 1}"
            say(f"p is corrected for {tests} tests {pairs} (Holm); the intervals are not")
    say(*_left_out(groups, known))
    return 0


def _best(
    groups: Sequence["RunGroup"], found: Sequence["ConfigDifference | None"], lower: bool
) -> list[str]:
    """Return the best config with its seeds, and how the second of ``found`` differs."""
    runs = groups[0].values
    seeds = sorted(
        (str(one.seed) for one in runs if one.seed is not None), key=lambda s: (len(s), s)
    )
    more = f" and {len(seeds) - _MOST_SEEDS} more" if len(seeds) > _MOST_SEEDS else ""
    listed = f"seeds {', '.join(seeds[:_MOST_SEEDS])}{more}" if seeds else f"n = {len(runs)}"
    lines = [f"best:   {groups[0].label} ({listed})"]
    second = found[1] if found else None
    if second is not None:
        p = (
            f", p {_number(second.corrected)}, {_test(second)}"
            if second.corrected is not None
            else ""
        )
        facts = f"interval {_ends(second.difference)}{p}"
        lines.append(f"second: {groups[1].label}, {second.difference.value:+.5g} ({facts})")
        if second.wins is not None and (second.difference.value < 0) == lower:
            lines.append("caution: over the common seeds the second is better than the best mean")
    return lines


def _group_rows(
    groups: Sequence["RunGroup"], spreads: Sequence["Spread | None"], lower: bool
) -> list[list[str]]:
    rows = [["row", "n", "mean", "interval", "std", "best", "group"]]
    for number, (group, spread) in enumerate(zip(groups, spreads, strict=True), 1):
        if spread is None:
            rows.append([str(number), "0", *["-"] * 4, group.label])
            continue
        best = (min if lower else max)(one.best for one in group.values)
        facts = [_number(spread.mean.value), _ends(spread.mean), _number(spread.std)]
        rows.append([str(number), str(spread.n), *facts, _number(best), group.label])
    return rows


def _pair_rows(
    groups: Sequence["RunGroup"], found: Sequence["ConfigDifference | None"]
) -> list[list[str]]:
    rows = [["row", "difference", "interval", "p", "better", "test", "group"]]
    for number, (group, one) in enumerate(zip(groups, found, strict=True), 1):
        if one is not None:
            wins = "-" if one.wins is None else f"{one.wins}/{one.sizes[0]}"
            facts = [_number(one.difference.value), _ends(one.difference), _number(one.corrected)]
            rows.append([str(number), *facts, wins, _test(one), group.label])
    return rows


def _test(one: "ConfigDifference") -> str:
    if one.wins is not None:
        return f"paired t, {one.sizes[0]} seeds"
    return f"Welch, {one.sizes[1]} and {one.sizes[0]} runs" if min(one.sizes) > 1 else "-"


def _left_out(groups: Sequence["RunGroup"], known: Mapping[str, str]) -> list[str]:
    """Return a line for each run that does not count."""
    found = [
        f"  row {number}: {known[run]}{'' if seed is None else f' (seed {seed})'}: {why}"
        for number, group in enumerate(groups, 1)
        for run, seed, why in group.left_out
    ]
    lines = []
    if found:
        count = "1 run does" if len(found) == 1 else f"{len(found):,} runs do"
        lines += ["", f"{count} not count:", *found[:_MOST_LISTED]]
        if len(found) > _MOST_LISTED:
            lines.append(f"  … {len(found) - _MOST_LISTED:,} more, with --json")
    return lines


def _as_data(
    question: Any,
    groups: Sequence["RunGroup"],
    spreads: Sequence["Spread | None"],
    found: Sequence["ConfigDifference | None"],
    against: int,
    tests: int,
) -> dict[str, Any]:
    return {
        "question": asdict(question),
        "against": against,
        "tests": tests,
        "groups": [
            {
                "label": group.label,
                "config": group.keys,
                "statistics": None if spread is None else asdict(spread),
                "comparison": None if one is None else asdict(one),
                "runs": [asdict(value) for value in group.values],
                "left_out": [
                    {"run": run, "seed": seed, "reason": why} for run, seed, why in group.left_out
                ],
            }
            for group, spread, one in zip(groups, spreads, found, strict=True)
        ],
    }


def _ends(interval: "ConfidenceInterval") -> str:
    if interval.low is None:
        return "-"
    return f"{_number(interval.low)} … {_number(interval.high)}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.5g}"
