"""The plots of `hpcrun plot` in the terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcrun.results.report.runs import ReportedRun
from hpcrun.results.report.words import metric_label

LETTERS = "abcdefghijklmnopqrstuvwxyz"
_GUTTER = 10


@dataclass(frozen=True)
class Curve:
    """Points in the order of x."""

    name: str
    x: NDArray[np.float64]
    y: NDArray[np.float64]


def default_metrics(runs: Sequence[ReportedRun]) -> list[str]:
    """Return loss, validation loss, learning rate and throughput, as far as a run has them."""
    rates = sorted({run.throughput for run in runs if run.throughput})
    wanted = ["loss", "validation_loss", "lr", *rates]
    return [name for name in wanted if any(len(run.series(name)[0]) for run in runs)]


def terminal_lines(
    runs: Mapping[str, ReportedRun], metrics: Sequence[str], width: int, height: int
) -> list[str]:
    """Return the plots of ``metrics`` as lines of text; ``runs``: each run by its name."""
    lines: list[str] = []
    if len(runs) > 1:
        lines.append("curves")
        for letter, (name, run) in _lettered([*runs.items()]):
            lines.append(f"  {letter}  {name} ({run.state})")
        lines.append("")
    for metric in metrics:
        curves = [Curve(name, *run.series(metric)) for name, run in runs.items()]
        lines += plot(f"{metric_label(metric)} over steps", curves, width, height)
        without = [curve.name for curve in curves if not len(curve.x)]
        if without and len(without) < len(curves):
            lines.append(f"  without {metric}: {', '.join(without)}")
        lines.append("")
    return lines[:-1]


def _lettered(items: Sequence[Any]) -> list[tuple[str, Any]]:
    return [(LETTERS[at % len(LETTERS)], item) for at, item in enumerate(items)]


def plot(title: str, curves: Sequence[Curve], width: int, height: int) -> list[str]:
    """Return a plot as lines of at most ``width`` characters; without a curve, no lines.

    Each curve has a letter, so that curves differ without colors; a later curve covers an earlier one.
    """
    lettered = [(letter, curve) for letter, curve in _lettered(curves) if len(curve.x)]
    if not lettered:
        return []
    log = _wants_log(np.concatenate([curve.y for _, curve in lettered]))
    points = [
        (letter, curve.x, np.log10(curve.y) if log else curve.y) for letter, curve in lettered
    ]
    left, right = _range(np.concatenate([x for _, x, _ in points]))
    low, high = _range(np.concatenate([y for _, _, y in points]))
    columns = max(width - _GUTTER - 2, 10)
    grid = [[" "] * columns for _ in range(height)]
    for letter, x, y in points:
        across = (x - left) / (right - left) * (columns - 1)
        down = (high - y) / (high - low) * (height - 1)
        for column, row in _cells(across, down):
            grid[row][column] = letter
    lines = [f"{title}{' (logarithmic)' if log else ''}"[:width]]
    for at, cells in enumerate(grid):
        value = high - at / max(height - 1, 1) * (high - low)
        tick = "" if at % 4 and at != height - 1 else f"{10**value if log else value:.4g}"
        lines.append(f"{tick:>{_GUTTER}} ┤{''.join(cells).rstrip()}")
    first, last = f"{left:g}", f"{right:g}"
    lines.append(" " * (_GUTTER + 1) + "└" + "─" * columns)
    gap = " " * max(columns - len(first) - len(last), 1)
    return [*lines, " " * (_GUTTER + 2) + first + gap + last]


def _range(values: NDArray[np.float64]) -> tuple[float, float]:
    low, high = float(values.min()), float(values.max())
    half = abs(low) / 2 or 0.5
    # The mean of equal values has a rounding error.
    equal = math.isclose(low, high, rel_tol=1e-12)
    return (low - half, high + half) if equal else (low, high)


def _cells(across: NDArray[np.float64], down: NDArray[np.float64]) -> list[tuple[int, int]]:
    """Return the cells, column and row, that a curve with straight lines between its points crosses."""
    found = [(round(float(across[0])), round(float(down[0])))]
    for at in range(1, len(across)):
        x, y = across[at - 1 : at + 1].tolist(), down[at - 1 : at + 1].tolist()
        steps = math.ceil(max(abs(x[1] - x[0]), abs(y[1] - y[0]), 1)) + 1
        for one, other in zip(
            np.linspace(x[0], x[1], steps), np.linspace(y[0], y[1], steps), strict=True
        ):
            found.append((round(float(one)), round(float(other))))
    return found


def _wants_log(values: NDArray[np.float64]) -> bool:
    """Return True if all values are positive and span more than a factor of 30."""
    # A product of Python's floats becomes infinite without a warning.
    return bool(values.min() > 0 and float(values.max()) > 30 * float(values.min()))
