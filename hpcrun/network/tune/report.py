"""The report of a search: the winning variables with their evidence, and nccl-tests' table."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from hpcrun.network.tune.knobs import (
    Cell,
    Env,
    Trial,
    bandwidths,
    bus_factor,
    changes_order,
    page_of,
)
from hpcrun.network.tune.search import (
    Comparison,
    Found,
    TriedOption,
    cell_gains,
    median_time,
    words,
)

_SLOWER = -0.05
_TABLE_SHARES = ("all_gather", "reduce_scatter", "alltoall")
_NO_TIME = f"{'N/A':>7}  {'N/A':>6}  {'N/A':>6}  {'N/A':>5}"
_TABLE_SUM = ("all_reduce", "reduce_scatter")


def finding_lines(found: Found) -> list[str]:
    """Return the result as lines: the variables to set, or the default; then the tried settings."""
    lines = [_tried_line(one) for one in found.tried]
    if not found.env:
        why = ""
        if found.final is not None:
            why = f": the settings together are not faster than the default ({_figures(found.final)} pairs)"
        return [*lines, "", f"keep the defaults{why or ': no setting is faster in fresh trials'}"]
    assert found.final is not None
    lines += ["", f"set {words(found.env)}: {_figures(found.final)} pairs"]
    slower = [cell for cell, gain in _gains(found).items() if gain < _SLOWER]
    if slower:
        lines.append(
            f"slower with it: {', '.join(f'{one.collective} {one.size} B' for one in slower)}"
        )
    return [*lines, _order_line(found.env)]


def as_yaml(found: Found, about: str) -> str:
    """Return ``job.env`` as a part of a config, with the evidence as comments."""
    lines = [f"# hpcrun nccl tune: {about}"]
    lines += [f"# {line}" for line in finding_lines(found) if line]
    if not found.env:
        return "\n".join([*lines, "job:", "  env: {}", ""])
    for cell, gain in _gains(found).items():
        before, after = (median_time(trials, cell) for trials in (found.default, found.setting))
        lines.append(
            f"# {cell.collective:<14} {cell.size:>11} B  {before * 1e6:>12.1f} us -> {after * 1e6:>12.1f} us"
            f"  {gain:+.0%}"
        )
    lines += [f"# {one.knob.name}: {page_of(one.knob)}" for one in found.tried if one.kept]
    lines += ["job:", "  env:"]
    return "\n".join(
        [*lines, *(f"    {key}: {json.dumps(value)}" for key, value in found.env.items()), ""]
    )


def table(trials: Sequence[Trial], collective: str, ranks: int) -> list[str]:
    """Return the lines of nccl-tests' table for one collective: its times out of place, none in place."""
    lines = [
        f"# {collective}: {ranks} ranks, float32, medians of {len(trials)} fresh process groups"
        " (torch.distributed; all_reduce and broadcast in place)",
        "#                                                              out-of-place"
        "                       in-place          ",
        "#       size         count      type   redop    root     time   algbw   busbw #wrong"
        "     time   algbw   busbw #wrong",
        "#        (B)    (elements)                               (us)  (GB/s)  (GB/s)       "
        "     (us)  (GB/s)  (GB/s)       ",
    ]
    cells = [cell for cell in _cells(trials) if cell.collective == collective]
    for cell in cells:
        seconds = median_time(trials, cell)
        algbw, busbw = bandwidths(cell, seconds, ranks)
        wrong = sum(trial.timings[cell].wrong for trial in trials)
        redop = "sum" if collective in _TABLE_SUM else "none"
        root = 0 if collective == "broadcast" else -1
        count = cell.size // 4 // (ranks if collective in _TABLE_SHARES else 1)
        lines.append(
            f"{cell.size:>12}  {count:>12}  {'float':>8}  {redop:>6}  {root:>6}  {seconds * 1e6:>7.2f} "
            f" {algbw / 1e9:>6.2f}  {busbw / 1e9:>6.2f}  {wrong:>5}  {_NO_TIME}"
        )
    if cells:
        rates = [bandwidths(cell, median_time(trials, cell), ranks)[1] for cell in cells]
        lines.append(f"# Avg bus bandwidth    : {sum(rates) / len(rates) / 1e9:g}")
    return lines


def as_data(found: Found, ranks: int, about: Mapping[str, Any]) -> dict[str, Any]:
    """Return everything as plain data: times in seconds, rates in bytes per second."""
    return {
        **about,
        "env": found.env,
        "changes_order": changes_order(found.env),
        "final": _record(found.final),
        "tried": [
            {
                "knob": one.knob.name,
                "env": dict(one.option),
                "screened": _record(one.screened),
                "confirmed": _record(one.confirmed),
                "kept": one.kept,
                "order": one.knob.order,
                "source": page_of(one.knob),
            }
            for one in found.tried
        ],
        "default": _trials(found.default, ranks),
        "setting": _trials(found.setting, ranks),
    }


def _trials(trials: Sequence[Trial], ranks: int) -> list[dict[str, Any]]:
    return [
        {
            "problem": trial.problem,
            "cells": [
                {
                    "collective": cell.collective,
                    "size": cell.size,
                    "seconds": timing.seconds,
                    "algbw": cell.size / timing.seconds,
                    "busbw": cell.size / timing.seconds * bus_factor(cell.collective, ranks),
                    "wrong": timing.wrong,
                }
                for cell, timing in sorted(trial.timings.items())
            ],
        }
        for trial in trials
    ]


def _tried_line(one: TriedOption) -> str:
    shown = one.confirmed or one.screened
    stage = "fresh pairs" if one.confirmed else "first pairs"
    mark = "kept" if one.kept else "not kept"
    order = "; changes the order of addition" if one.knob.order else ""
    return f"{words(one.option)}: {_figures(shown)} {stage}; {mark}{order}"


def _figures(shown: Comparison) -> str:
    if shown.problem:
        return f"does not work ({shown.problem}) in {shown.pairs}"
    gain = "works, where the default does not"
    if not math.isinf(shown.gain):
        gain = f"{abs(shown.gain):.0%} {'faster' if shown.gain >= 0 else 'slower'}"
    return f"{gain}, faster in {shown.faster} of {shown.pairs}"


def _order_line(env: Env) -> str:
    changing = changes_order(env)
    if not changing:
        return "the order of addition stays, so results stay bit-identical"
    return (
        f"{', '.join(changing)}: can change the order of addition and so the last bits of "
        "sums; --deterministic excludes such settings"
    )


def _gains(found: Found) -> Mapping[Cell, float]:
    return cell_gains(found.setting, found.default)


def _cells(trials: Sequence[Trial]) -> list[Cell]:
    return sorted(set.intersection(*(set(trial.timings) for trial in trials))) if trials else []


def _record(one: Comparison | None) -> dict[str, Any] | None:
    return None if one is None else {**vars(one)}
