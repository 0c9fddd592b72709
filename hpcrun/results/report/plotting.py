"""The plots of `hpcrun plot`: in the terminal, and as one file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.cells import cell_len

from hpcrun.results.report.canvas import label, save_as
from hpcrun.results.report.efficiency import wants_log
from hpcrun.results.report.runs import ReportedRun, ReportError

FORMATS = (".png", ".pdf", ".svg")
_BAR = 24
_PARTS = (
    "productive",
    "checkpoint",
    "recomputed",
    "start_up",
    "queue",
    "requeue_wait",
    "suspended",
)


def default_metrics(runs: Sequence[ReportedRun]) -> list[str]:
    """Return loss, validation loss, learning rate and throughput, as far as a run has them."""
    rates = sorted({run.throughput for run in runs if run.throughput})
    wanted = ["loss", "validation_loss", "lr", *rates]
    return [name for name in wanted if any(len(run.series(name)[0]) for run in runs)]


def terminal_lines(
    runs: Sequence[ReportedRun], metrics: Sequence[str], width: int, height: int
) -> list[str]:
    """Return the plots of ``metrics`` and the goodput of each run as lines of text."""
    from hpcrun.results.report.curves import metric_label

    lines: list[str] = []
    if len(runs) > 1:
        names = (
            f"  {LETTERS[at % len(LETTERS)]}  {run.label} ({run.state})"
            for at, run in enumerate(runs)
        )
        lines += ["runs", *names, ""]
    for metric in metrics:
        curves = [Curve(run.label, *run.series(metric)) for run in runs]
        title = f"{metric_label(metric)} over steps"
        lines += [*plot(title, curves, width, height), *_without(metric, curves), ""]
    return [*lines, *_goodput_lines(runs)]


def save_plot(runs: Sequence[ReportedRun], metrics: Sequence[str], path: Path) -> None:
    """Write curves of ``metrics`` and the goodput as one PNG, PDF or SVG, atomically.

    Raises:
        ReportError: no run has anything to draw.
        OSError: the disk refused.
    """
    from hpcrun.results.report.panels import panels_figure

    figure = panels_figure(runs, metrics)
    if figure is None:
        raise ReportError(f"{path}: no run has metrics or events; nothing was drawn")
    save_as(figure, path)


def require_place(path: Path) -> None:
    """Raise ReportError if the file cannot be written.

    Raises:
        ReportError: the suffix is unknown, or the folder is missing.
    """
    if path.suffix.lower() not in FORMATS:
        raise ReportError(f"{path}: should end in .png, .pdf or .svg")
    if path.is_dir():
        raise ReportError(f"{path}: is a directory; name a file")
    if not path.absolute().parent.is_dir():
        raise ReportError(
            f"{path.absolute().parent}: no such directory; make it, or choose another -o"
        )


def _without(metric: str, curves: Sequence[Curve]) -> list[str]:
    """Return a line with the runs that have no value, so that no run is missing silently."""
    names = [curve.name for curve in curves if not len(curve.x)]
    return [f"  without {metric}: {', '.join(names)}"] if names and len(names) < len(curves) else []


def _goodput_lines(runs: Sequence[ReportedRun]) -> list[str]:
    timed = [run for run in runs if run.events]
    if not timed:
        return ["goodput: no run has an event log"]
    names = {run.key: label(run.label, 40) for run in timed}
    width = max(map(cell_len, names.values()))
    lines = ["goodput: productive share of all time except idle"]
    for run in timed:
        parts = run.goodput
        seconds = asdict(parts)
        rest = ", ".join(
            f"{name.replace('_', ' ')} {seconds[name]:.0f} s"
            for name in _PARTS
            if seconds[name] >= 0.5
        )
        share = f"{parts.ettr:4.0%}" if parts.ettr is not None else "   –"
        name = names[run.key] + " " * (width - cell_len(names[run.key]))
        lines.append(f"  {name} {share} {bar(parts.ettr or 0.0, _BAR)} {rest}")
    left = [run.label for run in runs if not run.events]
    return [*lines, *([f"  without events: {', '.join(left)}"] if left else [])]


# The bits of a braille pattern by column and row (Unicode chapter 21.1).
_BITS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
_BLANK = 0x2800
LETTERS = "abcdefghijklmnopqrstuvwxyz"
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_GUTTER = 10


@dataclass(frozen=True)
class Curve:
    """The points of one run, in the order of x."""

    name: str
    x: NDArray[np.float64]
    y: NDArray[np.float64]


def plot(title: str, curves: Sequence[Curve], width: int, height: int) -> list[str]:
    """Return a plot as lines of at most ``width`` characters; without a curve, no lines.

    A single curve has braille dots. Several curves have a letter each, so that they differ without
    colors; a later curve covers an earlier one.
    """
    curves = [curve for curve in curves if len(curve.x)]
    if not curves:
        return []
    columns = max(width - _GUTTER - 2, 10)
    log = wants_log([curve.y for curve in curves])
    x_range = _range([curve.x for curve in curves])
    y_range = _range([np.log10(curve.y) if log else curve.y for curve in curves])
    rows = _single(curves[0], x_range, y_range, columns, height, log=log)
    if len(curves) > 1:
        rows = _several(curves, x_range, y_range, columns, height, log=log)
    lines = [f"{title}{' (logarithmic)' if log else ''}"[:width]]
    for at, row in enumerate(rows):
        lines.append(f"{_tick(at, height, y_range, log=log):>{_GUTTER}} ┤{row.rstrip()}")
    left, right = f"{x_range[0]:g}", f"{x_range[1]:g}"
    lines.append(" " * (_GUTTER + 1) + "└" + "─" * columns)
    lines.append(
        " " * (_GUTTER + 2) + left + " " * max(columns - len(left) - len(right), 1) + right
    )
    return lines


def bar(share: float, width: int) -> str:
    """Return a bar for ``share`` (0 to 1) of ``width`` characters, to an eighth of a character."""
    eighths = round(min(max(share, 0.0), 1.0) * width * 8)
    whole, rest = divmod(eighths, 8)
    return (_EIGHTHS[8] * whole + (_EIGHTHS[rest] if rest else "")).ljust(width)


def _range(values: Sequence[NDArray[np.float64]]) -> tuple[float, float]:
    low = min(float(one.min()) for one in values)
    high = max(float(one.max()) for one in values)
    half = abs(low) / 2 or 0.5
    return (low, high) if high > low else (low - half, high + half)


def _cells(
    curve: Curve,
    x_range: tuple[float, float],
    y_range: tuple[float, float],
    columns: int,
    rows: int,
    *,
    log: bool,
) -> list[tuple[int, int]]:
    """Return the cells that a curve crosses, with straight lines between its points."""
    y = np.log10(curve.y) if log else curve.y
    across = (curve.x - x_range[0]) / (x_range[1] - x_range[0]) * (columns - 1)
    down = (y_range[1] - y) / (y_range[1] - y_range[0]) * (rows - 1)
    found = [(round(float(across[0])), round(float(down[0])))]
    for at in range(1, len(across)):
        steps = max(
            1, math.ceil(max(abs(across[at] - across[at - 1]), abs(down[at] - down[at - 1])))
        )
        for part in np.linspace(0, 1, min(steps, columns + rows) + 1)[1:].tolist():
            cell = (
                round(float(across[at - 1] + part * (across[at] - across[at - 1]))),
                round(float(down[at - 1] + part * (down[at] - down[at - 1]))),
            )
            if cell != found[-1]:
                found.append(cell)
    return found


def _single(
    curve: Curve,
    x_range: tuple[float, float],
    y_range: tuple[float, float],
    columns: int,
    height: int,
    *,
    log: bool,
) -> list[str]:
    grid = np.zeros((height, columns), int)
    for x, y in _cells(curve, x_range, y_range, 2 * columns, 4 * height, log=log):
        grid[y // 4, x // 2] |= _BITS[x % 2][y % 4]
    return ["".join(chr(_BLANK + cell) if cell else " " for cell in row) for row in grid.tolist()]


def _several(
    curves: Sequence[Curve],
    x_range: tuple[float, float],
    y_range: tuple[float, float],
    columns: int,
    height: int,
    *,
    log: bool,
) -> list[str]:
    grid = [[" "] * columns for _ in range(height)]
    for number, curve in enumerate(curves):
        for x, y in _cells(curve, x_range, y_range, columns, height, log=log):
            grid[y][x] = LETTERS[number % len(LETTERS)]
    return ["".join(row) for row in grid]


def _tick(at: int, height: int, y_range: tuple[float, float], *, log: bool) -> str:
    if at % 4 and at != height - 1:
        return ""
    value = y_range[1] - at / max(height - 1, 1) * (y_range[1] - y_range[0])
    return f"{10**value if log else value:.4g}"
