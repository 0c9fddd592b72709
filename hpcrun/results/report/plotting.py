"""The plots of `hpcrun plot`: in the terminal, and as one file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.cells import cell_len

from hpcrun.results.report.errors import ReportError
from hpcrun.results.report.figures.canvas import label, save_as
from hpcrun.results.report.runs import ReportedRun
from hpcrun.results.report.terminal import LETTERS, Curve, bar, plot

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
    from hpcrun.results.report.figures.curves import metric_label

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
    from hpcrun.results.report.figures.panels import panels_figure

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
