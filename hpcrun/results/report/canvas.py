"""The style of all figures, and their files.

Colors are Okabe and Ito's (2008), which people with color vision deficiency can distinguish, without the
yellow, which is too light on white.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcrun.printing import escaped
from hpcrun.run.files import write_atomic

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, GRID, PAPER = "#1b1f24", "#646c76", "#dfe3e8", "#fdfdfd"
SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
OTHERS = "#9aa1aa"
RAMP = ("#440154", "#443983", "#31688e", "#21918c", "#35b779", "#90d743", "#dce319")
"""Seven steps of viridis, dark for the worst value."""
BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY = SERIES
PALE = "#c9cfd6"

VARIABLES = {
    **{INK: "ink", MUTED: "muted", GRID: "grid", PAPER: "paper", OTHERS: "others", PALE: "pale"},
    **{color: f"c{number}" for number, color in enumerate(SERIES)},
    **{color: f"r{number}" for number, color in enumerate(RAMP)},
}
"""The CSS variable of each color, so that the report's dark scheme has other colors."""

WIDTH = 4.6
"""Inches of a figure of one column."""
_FONT = "DejaVu Sans, Verdana, sans-serif"
_LONGEST_NAME = 44
_COLOR = re.compile(r"#[0-9a-f]{6}\b")
# Fonts of other scripts; matplotlib draws a box for a letter without a font.
_OTHER_FONTS = (
    *("Noto Sans CJK JP", "Noto Sans CJK SC", "WenQuanYi Zen Hei", "IPAGothic", "Arial Unicode MS"),
    *("Noto Emoji", "Symbola"),
)
_STYLE: Any = {
    "font.size": 8,
    "axes.titlesize": 8.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.facecolor": "none",
    "axes.linewidth": 0.7,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.labelsize": 7.5,
    "ytick.labelsize": 7.5,
    "lines.linewidth": 1.4,
    "lines.markersize": 4,
    "legend.frameon": False,
    "legend.fontsize": 7.5,
    "legend.handlelength": 1.6,
    "figure.facecolor": "none",
    "svg.fonttype": "none",
    "pdf.fonttype": 42,
    "text.parse_math": False,
    "axes.formatter.use_mathtext": False,
    "path.simplify_threshold": 0.3,
}


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


@contextmanager
def style() -> Iterator[None]:
    """Draw in the style of all figures."""
    import matplotlib
    from matplotlib.font_manager import get_font_names

    here = set(get_font_names())
    fonts = ["DejaVu Sans", *(font for font in _OTHER_FONTS if font in here)]
    drawing = matplotlib.rc_context({**_STYLE, "font.family": fonts})
    # The ticks of a loss of 1e308 overflow, without harm.
    with drawing, warnings.catch_warnings(), np.errstate(all="ignore"):
        # Keep text as text in SVG, so that the browser finds a font.
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        yield


def new_figure(
    width: float = WIDTH, height: float = 2.9, panels: int = 1
) -> tuple[Figure, Sequence[Axes]]:
    """Return a figure with ``panels`` axes above each other. Only inside :func:`style`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(panels, 1, squeeze=False)
    return figure, [row[0] for row in axes]


def label(text: str, longest: int = _LONGEST_NAME) -> str:
    """Return a foreign text as a label: on one line, without control characters, shortened in the middle."""
    text = escaped(text)
    if len(text) <= longest:
        return text
    half = (longest - 1) // 2
    return f"{text[: longest - 1 - half]}…{text[-half:]}"


def count_axis(axis: Any) -> None:
    """Label an axis of whole numbers as 10k and 2M."""
    from matplotlib.ticker import EngFormatter

    axis.set_major_formatter(EngFormatter(sep=""))


def log_axis(axis: Any) -> None:
    """Label a logarithmic axis with plain numbers; between two decades also 2 and 5."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=9))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def save(drawing: Drawing, folder: Path, formats: Sequence[str] = ("png", "pdf")) -> list[Path]:
    """Write a figure's files below ``folder``, each atomically; return their paths.

    Raises:
        OSError: the disk refused.
    """
    return [save_as(drawing.figure, folder / f"{drawing.name}.{kind}") for kind in formats]


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


def as_svg(drawing: Drawing) -> str:
    """Return a figure as an ``<svg>`` element for a page: CSS variables as colors, ids of its own."""
    import matplotlib

    stream = io.StringIO()
    with style(), matplotlib.rc_context({"svg.hashsalt": drawing.name}):
        drawing.figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None})
    return _inline(stream.getvalue(), drawing)


def _inline(text: str, drawing: Drawing) -> str:
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    head, _, body = text.partition(">")
    box = re.search(r'viewBox="([^"]*)"', head)
    width, height = (box[1] if box else "0 0 100 100").split()[2:]
    body = re.sub(r"<style.*?</style>", "", body, count=1, flags=re.DOTALL)
    body = body.replace("xlink:href=", "href=")
    # A text of the figure may look like an attribute or a color.
    body = re.sub(r"<[^>]*>", lambda found: _own_tag(found[0], drawing.name), body)
    for part, words in drawing.titles.items():
        mark = f'<g id="{drawing.name}-{part}">'
        body = body.replace(mark, f"{mark}<title>{escape(escaped(words))}</title>", 1)
    return (
        f'<svg class="figure" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{escape(escaped(drawing.title))}" data-width="{float(width):.0f}" '
        f'style="max-width: {float(width) * 1.34:.0f}px">{body}'
    )


def _own_tag(tag: str, name: str) -> str:
    """Return a tag with the page's fonts and colors, and the figure's name in front of each id."""
    tag = re.sub(r'\b(id|clip-path|href)="(url\()?#?', lambda found: f"{found[0]}{name}-", tag)
    tag = re.sub(r"font: ([\d.]+px|[a-z]+ [\d.]+px)[^;\"]*", rf"font: \1 {_FONT}", tag)
    return _COLOR.sub(_variable, tag)


def _variable(found: re.Match[str]) -> str:
    name = VARIABLES.get(found[0])
    return f"var(--{name}, {found[0]})" if name else found[0]
