"""Compare the configs in results.h5 over their seeds.

Runs with the same config form a group. Differences in seed, job, restarts,
checkpoint and watch are ignored. Only finished runs count; other
runs are listed. The second table compares the groups with one group per seed.

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
    from hpcrun.results.statistics import ConfidenceInterval, Paired, Spread

_STATES = ("cancelled", "pruned", "stopped", "failed", "unfinished")
_MOST_LISTED = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("file", metavar="FILE", type=Path, help="a file of `hpcrun aggregate`")
    add_comparison(parser)
    parser.add_argument(
        "--include",
        action="append",
        default=[],
        choices=_STATES,
        help="runs in this state count as well (may be repeated)",
    )
    parser.add_argument(
        "--against", type=int, default=1, metavar="ROW", help="the row to compare with (default: 1)"
    )
    parser.add_argument(
        "--confidence",
        type=float,
        default=0.95,
        metavar="SHARE",
        help="confidence of the intervals (default: 0.95)",
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

    _require_sense(arguments)
    require("report", "scipy")
    from hpcrun.results.statistics import describe
    from hpcrun.results.store import ResultsFile

    with ResultsFile(arguments.file) as store:
        metric = arguments.metric or default_metric(store)
        goal = arguments.goal or ("min" if lower_is_better(metric) else "max")
        question = Question(
            metric=metric,
            at=arguments.at,
            lower=goal == "min",
            seed_key=arguments.seed_key,
            include=arguments.include,
            by=keys(arguments.by),
        )
        groups = grouped(store, question)
        known = labels(store)
    if not 1 <= arguments.against <= len(groups):
        raise UserError(
            f"--against {arguments.against}: no such row; choose a row from 1 to {len(groups)}"
        )
    spreads = [
        describe(group.numbers(), confidence=arguments.confidence) if group.values else None
        for group in groups
    ]
    base = groups[arguments.against - 1]
    pairs = [
        None if group is base else _paired(base, group, question.lower, arguments.confidence)
        for group in groups
    ]
    if arguments.json:
        print_json(_as_data(question, groups, spreads, pairs, arguments.against))
        return 0
    at = f"at step {arguments.at}" if arguments.at.isdigit() else arguments.at
    say(f"{metric} ({at}, {goal} is best), {arguments.confidence:.0%} intervals")
    say(*aligned(_group_rows(groups, spreads, question.lower, known), range(9)))
    if question.at == "best":
        say(f"caution: {BEST_IS_BIASED}")
    if not any(group.known for group in groups):
        say("no run has a config, so the runs form one group")
    if len(groups) > 1:
        say("", f"difference to row {arguments.against}, over the common seeds")
        say(*aligned(_pair_rows(groups, pairs), range(7)))
        if len(groups) > 2:
            say(f"p is not corrected for {len(groups) - 1} comparisons")
    say(*_left_out(groups, known))
    return 0


def _require_sense(arguments: argparse.Namespace) -> None:
    require_moment(arguments.at)
    if not 0.5 <= arguments.confidence < 1:
        raise UserError(f"--confidence {arguments.confidence}: should be 0.5 to less than 1")


def _paired(base: "RunGroup", group: "RunGroup", lower: bool, confidence: float) -> "Paired | None":
    from hpcrun.results.statistics import compare_paired

    first = {one.seed: one.value for one in base.values if one.seed is not None}
    second = {one.seed: one.value for one in group.values if one.seed is not None}
    shared = sorted(first.keys() & second.keys(), key=str)
    if not shared:
        return None
    return compare_paired(
        [first[seed] for seed in shared],
        [second[seed] for seed in shared],
        lower_is_better=lower,
        confidence=confidence,
    )


def _group_rows(
    groups: Sequence["RunGroup"],
    spreads: Sequence["Spread | None"],
    lower: bool,
    known: Mapping[str, str],
) -> list[list[str]]:
    head = "row,n,mean,interval,std,median,best,at step,of,group"
    rows = [head.split(",")]
    for number, (group, spread) in enumerate(zip(groups, spreads, strict=True), 1):
        if spread is None:
            rows.append([str(number), "0", *["-"] * 7, group.label])
            continue
        best = (min if lower else max)(group.values, key=lambda one: one.best)
        rows.append(
            [
                *(str(number), str(spread.n), _number(spread.mean.value), _ends(spread.mean)),
                *(_number(spread.std), _number(spread.median)),
                *(_number(best.best), str(best.best_step), known[best.run], group.label),
            ]
        )
    return rows


def _pair_rows(groups: Sequence["RunGroup"], pairs: Sequence["Paired | None"]) -> list[list[str]]:
    rows = [["row", "n", "difference", "interval", "effect", "p", "better", "group"]]
    for number, (group, pair) in enumerate(zip(groups, pairs, strict=True), 1):
        if pair is not None:
            rows.append(
                [
                    *(str(number), str(pair.n), _number(pair.difference.value)),
                    *(_ends(pair.difference), _number(pair.effect), _number(pair.p)),
                    *(f"{pair.wins}/{pair.n}", group.label),
                ]
            )
    return rows if len(rows) > 1 else [["no seed is in both"]]


def _left_out(groups: Sequence["RunGroup"], known: Mapping[str, str]) -> list[str]:
    """Return a line for each run that does not count, and for the missing seeds."""
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
    missing = [
        f"  row {number}: {', '.join(map(str, group.missing))}"
        for number, group in enumerate(groups, 1)
        if group.missing
    ]
    return [*lines, *(["", "seeds that other rows have:", *missing] if missing else [])]


def _as_data(
    question: Any,
    groups: Sequence["RunGroup"],
    spreads: Sequence["Spread | None"],
    pairs: Sequence["Paired | None"],
    against: int,
) -> dict[str, Any]:
    return {
        "question": asdict(question),
        "against": against,
        "groups": [
            {
                "label": group.label,
                "config": group.keys,
                "statistics": None if spread is None else asdict(spread),
                "paired": None if pair is None else asdict(pair),
                "runs": [asdict(value) for value in group.values],
                "left_out": [
                    {"run": run, "seed": seed, "reason": why} for run, seed, why in group.left_out
                ],
                "missing_seeds": group.missing,
            }
            for group, spread, pair in zip(groups, spreads, pairs, strict=True)
        ],
    }


def _ends(interval: "ConfidenceInterval") -> str:
    if interval.low is None:
        return "-"
    return f"{_number(interval.low)} … {_number(interval.high)}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.5g}"
