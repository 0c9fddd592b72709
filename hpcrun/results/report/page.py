"""The HTML page of the report, and its files, each written atomically."""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment
from markupsafe import Markup

from hpcrun.printing import escaped
from hpcrun.results.groups import BEST_IS_BIASED
from hpcrun.results.report import figures, times
from hpcrun.results.report.content import Content, ReportRequest, collect, shown
from hpcrun.results.report.figures import Drawing
from hpcrun.results.report.runs import ReportError, counts, require_file_place
from hpcrun.results.store import ResultsFile, package_version
from hpcrun.run.files import write_atomic

# Mark of a report of hpcrun, so that no other file is replaced by mistake.
_HEAD = "<!DOCTYPE html>"
_SECTIONS = {
    "runs": "What ran",
    "curves": "Curves",
    "time": "Goodput and timeline",
    "failures": "Failures",
    "methods": "Methods and data",
}


def write_report(
    store: ResultsFile, request: ReportRequest, output: Path
) -> tuple[list[Drawing], str]:
    """Write the report of ``store`` to ``output``, atomically; return its figures, and words about it.

    Raises:
        ReportError: there are no runs.
        ResultsError: no run has the metric.
        OSError: the disk refused; ``output`` is unchanged.
    """
    # A diverged loss of 1e308 has an infinite mean, which the page shows.
    with np.errstate(all="ignore"):
        content = collect(store, request)
        drawn = _draw(content)
        page = _render(content, drawn)
    # A symbolic link stays: its target is replaced. The umask decides who may read.
    write_atomic(Path(os.path.realpath(output)), page, mode=0o666)
    states = ", ".join(f"{count:,} {state}" for state, count in counts(content.runs).items())
    whole = [one for drawings in drawn.values() for one in drawings]
    runs, words = several(len(content.runs), "run"), several(len(whole), "figure")
    return whole, f"{runs} ({states}), {words}"


def write_figures(drawings: Sequence[Drawing], folder: Path) -> list[Path]:
    """Write each figure as PNG and PDF below ``folder``, which is made; raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    return [
        figures.save_as(one.figure, folder / f"{one.name}.{kind}")
        for one in drawings
        for kind in ("png", "pdf")
    ]


def require_place(output: Path, folder: Path | None) -> None:
    """Raise ReportError before any work if the report cannot be written to its place.

    Raises:
        ReportError: a folder is missing, or a file of another kind is in the way.
    """
    require_file_place(output, "report.html")
    if output.is_file():
        with output.open("rb") as stream:
            head = stream.read(len(_HEAD)).decode(errors="replace")
        if head and head.lower() != _HEAD.lower():
            raise ReportError(
                f"{output}: is not an HTML report, and would be replaced; choose another -o"
            )
    if folder is not None and os.path.lexists(folder) and not folder.is_dir():
        raise ReportError(f"--figures {folder}: is a file; name a folder")


def _draw(content: Content) -> dict[str, list[Drawing]]:
    """Draw all figures that the runs have data for; return those of each section."""
    series = figures.series_of(content)
    rates = sorted({run.throughput for run in content.runs if run.throughput})
    names = [content.metric, "validation_loss", "loss", "lr", "mfu", "gpu_utilization", *rates]
    # The figure of a swept learning rate repeats the legend.
    swept = {key.rpartition(".")[2].strip("-") for key in content.swept}
    metrics = [name for name in dict.fromkeys(names) if name and name not in swept]
    curves = [figures.curve_figure(at, name, series) for at, name in enumerate(metrics, 1)]
    rows = times.chosen_rows(content.runs)
    bars = [times.goodput_figure(rows), times.timeline_figure(rows)]
    return {
        "curves": [one for one in curves if one is not None],
        "time": [one for one in bars if one is not None],
    }


def _render(content: Content, drawn: dict[str, list[Drawing]]) -> str:
    folder = files("hpcrun.results.report")
    page = Environment(autoescape=True, finalize=_text, trim_blocks=True, lstrip_blocks=True)
    page.filters |= {
        "duration": duration,
        "folder": os.path.dirname,
        "moment": moment,
        "number": number,
        "several": several,
        "share": share,
        "shown": shown,
        "tally": tally,
        "words": figures.metric_label,
    }
    template = page.from_string(folder.joinpath("page.html").read_text(encoding="utf-8"))
    text = template.render(
        caution=BEST_IS_BIASED,
        content=content,
        drawn=drawn,
        most_rows=times.MOST_ROWS,
        sections=_SECTIONS.items(),
        states=counts(content.runs).items(),
        style=folder.joinpath("page.css").read_text(encoding="utf-8"),
        version=package_version("hpcrun"),
    )
    return f"{text.strip()}\n"


def _text(value: Any) -> Any:
    """Return a value for the page: None is unknown, control characters become visible escapes.

    A log line may hold a sequence that a terminal obeys after it is copied from the page.
    """
    if value is None:
        return Markup('<span class="unknown">unknown</span>')
    return value if isinstance(value, Markup) else escaped(str(value))


def tally(values: Iterable[Any]) -> list[tuple[str, int]]:
    """Return the different values in words with their numbers, the most frequent first."""
    return Counter(
        "unknown" if value in (None, "") else shown(value) for value in values
    ).most_common()


def several(count: int, noun: str) -> str:
    """Return a count with its noun."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def number(value: float, digits: int = 4) -> str:
    """Return a number with ``digits`` significant digits."""
    if not math.isfinite(value):
        return "not finite"
    return f"{value:,.0f}" if abs(value) >= 10**digits else f"{value:.{digits}g}"


def duration(seconds: float | None) -> str | None:
    """Return seconds as 2 d 03:04, 3:04:05 or 41 s."""
    if seconds is None or seconds < 90:
        return None if seconds is None else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{days} d {hours:02d}:{minutes:02d}" if days else f"{hours}:{minutes:02d}:{rest:02d}"


def share(value: float | None) -> str | None:
    """Return a share as percent."""
    return None if value is None else f"{value:.0%}"


def moment(seconds: float | None) -> str | None:
    """Return Unix seconds as date and time in UTC; None for a damaged record, such as the year 10,000."""
    try:
        return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds)) if seconds else None
    except (OverflowError, OSError, ValueError):
        return None
