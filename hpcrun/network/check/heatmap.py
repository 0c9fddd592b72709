"""The rates between all nodes as a picture: colored cells in the terminal, or a PNG."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcrun.errors import NetworkError
from hpcrun.network.check.measurements import Transfer
from hpcrun.network.check.statistics import in_the_rounds, node_rates, usual_rate
from hpcrun.printing import escaped

if TYPE_CHECKING:
    from rich.table import Table

# Colors by the share of the usual rate; most people can distinguish these colors of the terminal.
_COLORS = ((0.25, "red"), (0.5, "dark_orange"), (0.75, "yellow"), (float("inf"), "green"))

_LARGEST = 14.0
"""Inches of the picture's side."""
_MOST_NAMES, _MOST_WITH_RATES = 64, 16


def matrix(nodes: Sequence[str], transfers: Sequence[Transfer]) -> list[list[float | None]]:
    """Return the rate from each node (row) to each node (column) in bit/s; None without a measurement.

    A connection that failed is 0.
    """
    rates = {(one.sender, one.receiver): one.rate or 0.0 for one in in_the_rounds(transfers)}
    return [[rates.get((sender, receiver)) for receiver in nodes] for sender in nodes]


def table(nodes: Sequence[str], transfers: Sequence[Transfer]) -> "Table":
    """Return the matrix as a table of rich: a row per sender, a column per receiver, in Gbit/s."""
    from rich.table import Table
    from rich.text import Text

    usual = usual_rate(node_rates(transfers)) or 1.0
    found = Table(box=None, pad_edge=False)
    found.add_column("")
    for number, _ in enumerate(nodes):
        found.add_column(str(number), justify="right")
    for number, (name, row) in enumerate(zip(nodes, matrix(nodes, transfers), strict=True)):
        cells = [_cell(rate, usual) for rate in row]
        found.add_row(
            Text(escaped(f"{number} {name}")), *(Text(text, style=style) for text, style in cells)
        )
    return found


def _cell(rate: float | None, usual: float) -> tuple[str, str]:
    if rate is None:
        return "·", ""
    color = next(color for limit, color in _COLORS if rate < limit * usual)
    return f"{rate / 1e9:.3g}", color


def write_png(
    path: Path, nodes: Sequence[str], transfers: Sequence[Transfer], bad: Collection[str] = ()
) -> None:
    """Write the matrix as a picture, the names of the nodes ``bad`` in red.

    Raises:
        NetworkError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise NetworkError(
            f"{path}: a picture needs matplotlib; `pip install matplotlib`, or omit --png"
        ) from error
    rates = matrix(nodes, transfers)
    size = min(_LARGEST, max(4.0, 0.5 * len(nodes) + 1.5))
    figure = Figure(figsize=(size + 1.2, size), layout="constrained")
    axes = figure.add_subplot()
    _draw(figure, axes, rates, usual_rate(node_rates(transfers)) or 1.0)
    _name_nodes(axes, nodes, bad)
    measured = sum(rate is not None for row in rates for rate in row)
    failed = sum(rate == 0 for row in rates for rate in row)
    told = f", {failed} without a connection (x)" if failed else ""
    axes.set_title(f"{len(nodes)} nodes, {measured} transfers{told}", fontsize=10)
    try:
        figure.savefig(path, dpi=100)
    except (OSError, ValueError) as error:
        raise NetworkError(f"{path}: cannot be written: {error}") from error


def _draw(figure: Any, axes: Any, rates: Sequence[Sequence[float | None]], usual: float) -> None:
    """Color each cell by its part of the usual rate, and write the rate into cells that are large enough."""
    most = 1.25 * usual / 1e9
    values = [[float("nan") if rate is None else rate / 1e9 for rate in row] for row in rates]
    axes.set_facecolor("0.92")
    # cividis looks the same to people who cannot distinguish red and green.
    image = axes.imshow(values, vmin=0, vmax=most, cmap="cividis", interpolation="nearest")
    figure.colorbar(image, label="Gbit/s", extend="max", shrink=0.8)
    for row, line in enumerate(rates):
        for column, rate in enumerate(line):
            if rate == 0:
                axes.plot(column, row, marker="x", color="red", markersize=8, markeredgewidth=2)
            elif rate is not None and len(rates) <= _MOST_WITH_RATES:
                dark = rate / 1e9 < 0.6 * most
                color = "white" if dark else "black"
                place = {"ha": "center", "va": "center", "fontsize": 8}
                axes.text(column, row, f"{rate / 1e9:.2g}", color=color, **place)


def _name_nodes(axes: Any, nodes: Sequence[str], bad: Collection[str]) -> None:
    """Write the names on both axes; for many nodes only the bad nodes and a few others."""
    every = -(-len(nodes) // _MOST_NAMES)
    red = [place for place, name in enumerate(nodes) if name in bad]
    # A name next to that of a bad node would cover it.
    others = [
        place
        for place in range(0, len(nodes), every)
        if all(abs(place - one) >= every for one in red)
    ]
    shown = sorted({*red, *others})
    names = [nodes[place] for place in shown]
    axes.set_xticks(shown, names, rotation=90, fontsize=8)
    axes.set_yticks(shown, names, fontsize=8)
    for label in (*axes.get_xticklabels(), *axes.get_yticklabels()):
        if label.get_text() in bad:
            label.set(color="red", fontweight="bold")
    axes.set_xlabel("to")
    axes.set_ylabel("from")
