"""The figures of a report, and their files: curves, timeline and goodput."""

from __future__ import annotations

import io
import logging
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

import matplotlib
import matplotlib.style
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, NullFormatter
from numpy.typing import NDArray

from hpcrun.printing import escaped
from hpcrun.results.report.content import Content
from hpcrun.results.report.runs import ReportedRun
from hpcrun.results.statistics import half_width
from hpcrun.run.files import write_atomic

SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY = SERIES
INK, OTHERS, PALE = "#1b1f24", "#9aa1aa", "#c9cfd6"
_MOST_GRAY = 60
"""Gray lines of configs without a color, and dashed lines of runs that do not count."""
# A figure is some 400 pixels wide.
_MOST_POINTS = 400
_NAMES = {
    "loss": "training loss",
    "validation_loss": "validation loss",
    "lr": "learning rate",
    "mfu": "model FLOP/s utilization",
    "gpu_utilization": "GPU utilization (%)",
}
Item = TypeVar("Item")
Line = NDArray[np.float64]


@dataclass(frozen=True)
class Drawing:
    """A figure with its name and caption.

    Args:
        name: of the file, without suffix.
        titles: tooltips by the id (gid) of a part of the figure.
        wide: the figure takes the width of the page.
    """

    name: str
    title: str
    caption: str
    figure: Figure
    titles: dict[str, str] = field(default_factory=dict)
    wide: bool = False

    def svg(self) -> str:
        """Return the figure as an ``<svg>`` element for a page, with ids of its own."""
        stream = io.StringIO()
        with style(), matplotlib.rc_context({"svg.hashsalt": self.name}):
            self.figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None})
        text = re.sub(r"<metadata>.*?</metadata>", "", stream.getvalue(), flags=re.DOTALL)
        head, _, body = text[text.index("<svg") :].partition(">")
        box = re.search(r'viewBox="[\d.]+ [\d.]+ ([\d.]+) ([\d.]+)"', head)
        width, height = (float(box[1]), float(box[2])) if box else (100.0, 100.0)
        body = body.replace("xlink:href=", "href=")
        # Only in tags: a text of the figure may look like an attribute.
        body = re.sub(r"<[^>]*>", lambda tag: re.sub(_REFERENCE, rf"\1{self.name}-", tag[0]), body)
        for part, words in self.titles.items():
            mark = f'<g id="{self.name}-{part}">'
            body = body.replace(mark, f"{mark}<title>{escape(escaped(words))}</title>", 1)
        return (
            f'<svg class="figure" viewBox="0 0 {width} {height}" role="img" '
            f'aria-label="{escape(escaped(self.title))}" '
            f'style="max-width: {width * 1.34:.0f}px">{body}'
        )


_REFERENCE = r'(\b(?:id|clip-path|href)="(?:url\()?#?)'


@dataclass(frozen=True)
class Series:
    """Runs that share one color: those of the band, and those that do not count, drawn dashed."""

    name: str
    counting: Sequence[ReportedRun]
    others: Sequence[ReportedRun] = ()

    @property
    def runs(self) -> list[ReportedRun]:
        """All runs."""
        return [*self.counting, *self.others]


@contextmanager
def style() -> Iterator[None]:
    """Draw in the style of all figures."""
    own = str(files("hpcrun.results.report").joinpath("report.mplstyle"))
    fonts = logging.getLogger("matplotlib.font_manager")
    level = fonts.level
    # The ticks of a loss of 1e308 overflow, without harm.
    with matplotlib.style.context(own), warnings.catch_warnings(), np.errstate(all="ignore"):
        # Text stays text in SVG, so that the browser finds a font; few machines have all fonts of the style.
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        fonts.setLevel(logging.ERROR)
        try:
            yield
        finally:
            fonts.setLevel(level)


def label(text: str, longest: int = 44) -> str:
    """Return a foreign text as a label: on one line, without control characters, shortened in the middle."""
    text = escaped(text)
    half = (longest - 1) // 2
    return text if len(text) <= longest else f"{text[: longest - 1 - half]}…{text[-half:]}"


def metric_label(metric: str) -> str:
    """Return a metric in words, with its unit."""
    if metric.endswith("_per_second"):
        return f"{metric.removesuffix('_per_second').replace('_', ' ')} per second"
    return _NAMES.get(metric, metric.replace("_", " "))


def file_name(text: str) -> str:
    """Return a foreign name as part of a file's name and of an id."""
    return re.sub(r"[^A-Za-z0-9_]+", "-", text).strip("-")[:40] or "x"


def save_as(figure: Figure, path: Path) -> Path:
    """Write one file with the suffix png, pdf or svg, atomically; raises OSError."""
    kind = path.suffix.removeprefix(".").lower()
    stamp = {"png": {"Software": None}, "pdf": {"CreationDate": None}, "svg": {"Date": None}}[kind]
    whole = io.BytesIO()
    with style():
        figure.savefig(whole, format=kind, dpi=200, facecolor="white", metadata=stamp)
    # Figures are for others too, so the umask decides who may read them.
    write_atomic(path, whole.getvalue(), mode=0o666)
    return path


def series_of(content: Content) -> list[Series]:
    """Return the runs of each config, the best config first; without configs, each run."""
    runs = {run.key: run for run in content.runs}
    return [
        Series(
            one.group.label,
            [runs[value.run] for value in one.group.values],
            [runs[key] for key, _, _ in one.group.left_out],
        )
        for one in content.groups
    ] or [Series(run.label, [run]) for run in content.runs]


def curve_figure(number: int, metric: str, series: Sequence[Series]) -> Drawing | None:
    """Return the curves of ``metric``; None if no run has a value.

    With more series than colors, the first ones have colors, and the others are thin gray lines.
    """
    series = [one for one in series if any(len(run.series(metric)[0]) for run in one.runs)]
    if not series:
        return None
    rows = min(len(series), len(SERIES) + 1)
    titles: dict[str, str] = {}
    with style():
        figure = Figure(figsize=(4.6, 2.5 + 0.155 * rows * (rows > 1)), layout="constrained")
        handles = draw_curves(figure.subplots(), metric, series, titles)
        if rows > 1:
            figure.legend(handles=handles, loc="outside lower left", labelspacing=0.25)
    words = metric_label(metric)
    title = words[:1].upper() + words[1:]
    caption = (
        f"{title} over steps. Lines: mean over the finished runs of a config; bands: 95% t-interval of the "
        "mean over seeds, for n > 1, over the steps that all of these runs have."
    )
    if any(one.others for one in series):
        caption += f" Dashed: an even sample of up to {_MOST_GRAY} runs that do not count."
    if len(series) > len(SERIES):
        more = len(series) - len(SERIES)
        sample = f"an even sample of {_MOST_GRAY} of " if more > _MOST_GRAY else ""
        caption += f" Colors: the {len(SERIES)} best configs; gray: {sample}{more} more configs."
    return Drawing(f"curve-{number}-{file_name(metric)}", title, caption, figure, titles)


def draw_curves(
    axes: Any, metric: str, series: Sequence[Series], titles: dict[str, str]
) -> list[Line2D]:
    """Draw a line for each of ``series``, with a band over its runs; return the legend."""
    colored = series[: len(SERIES)]
    shown = [*colored, *sampled(series[len(SERIES) :], _MOST_GRAY)]
    handles, drawn = [], []
    for at, one in reversed(list(enumerate(shown))):
        color = SERIES[at] if one in colored else OTHERS
        others = sampled(one.others, max(1, _MOST_GRAY // len(shown)))
        mean, half = band([run.series(metric) for run in one.counting])
        for run in [*others, *(one.counting if mean.empty else ())]:
            x, y = thinned(*run.series(metric))
            dash = (0, (3, 2)) if run in others else "-"
            axes.plot(x, y, color=color, lw=0.6, alpha=0.55, ls=dash, marker=_dot(x), ms=2)
        x, y = mean.index.to_numpy(), mean.to_numpy()
        width = 1.6 if one in colored else 0.7
        axes.plot(x, y, color=color, lw=width, marker=_dot(x), gid=f"series{at}")
        if half is not None and one in colored:
            axes.fill_between(x, y - half, y + half, color=color, alpha=0.18, lw=0)
        n = sum(bool(len(run.series(metric)[0])) for run in one.counting)
        titles[f"series{at}"] = f"{one.name}: n = {n}"
        drawn += [run.series(metric)[1] for run in one.runs]
        if one in colored:
            handles.append(Line2D([], [], color=color, label=f"{label(one.name, 56)}  (n={n})"))
    if len(series) > len(colored):
        more = f"{len(series) - len(colored)} more"
        handles.insert(0, Line2D([], [], color=OTHERS, lw=0.7, label=more))
    _scale_y(axes, metric, np.concatenate(drawn))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_xlabel("step")
    axes.set_ylabel(label(metric_label(metric)))
    return handles[::-1]


def _scale_y(axes: Any, metric: str, values: Line) -> None:
    if wants_log(values):
        axes.set_yscale("log")
        # The lower end of an interval may be below zero, which a logarithmic axis cannot show.
        axes.set_ylim(values.min() / 1.3, values.max() * 1.3)
        _log_axis(axes.yaxis)
    elif metric.endswith("_per_second") and len(values):
        axes.set_ylim(0, 1.05 * float(values.max()) or 1)
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))


def _log_axis(axis: Any) -> None:
    """Label a logarithmic axis with plain numbers; between two decades also 2 and 5."""
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def band(curves: Sequence[tuple[Line, Line]]) -> tuple[pd.Series, Line | None]:
    """Return the mean of curves over the range that all share, and half of its t-interval (n > 1).

    A curve has a value between two of its points by linear interpolation. Outside the shared range
    the mean would be of other runs than inside.
    """
    known = [pd.Series(y, index=x).groupby(level=0).last() for x, y in curves if len(x)] or [
        pd.Series(dtype=float)
    ]
    whole = pd.concat(known, axis=1).sort_index()
    whole = whole.interpolate("index", limit_area="inside").dropna()
    if len(whole) > _MOST_POINTS:
        whole = whole.iloc[np.linspace(0, len(whole) - 1, _MOST_POINTS).astype(int)]
    mean = whole.mean(axis=1)
    return mean, half_width(whole.to_numpy().T) if len(known) > 1 and len(whole) else None


def sampled(items: Sequence[Item], most: int) -> list[Item]:
    """Return at most ``most`` of ``items``, evenly over their order."""
    if len(items) <= most:
        return list(items)
    return [items[at * len(items) // most] for at in range(most)]


def thinned(x: Line, y: Line) -> tuple[Line, Line]:
    """Return a curve with few points: the lowest and the highest value of each part stay."""
    if len(x) <= _MOST_POINTS:
        return x, y
    kept = {0, len(x) - 1}
    for part in np.array_split(np.arange(len(x)), _MOST_POINTS // 2):
        kept |= {int(part[y[part].argmin()]), int(part[y[part].argmax()])}
    index = np.array(sorted(kept))
    return x[index], y[index]


def wants_log(values: Line) -> bool:
    """Return True if all values are positive and span more than a factor of 30."""
    # A product of Python's floats becomes infinite without a warning.
    return bool(len(values) and values.min() > 0 and float(values.max()) > 30 * float(values.min()))


def _dot(x: Line) -> str | None:
    return "o" if len(x) == 1 else None
