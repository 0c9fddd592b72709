"""The rates between all nodes as a picture: colored cells in the terminal, or a PNG."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hpcrun.network.check.measured import Transfer
from hpcrun.network.check.statistics import in_the_rounds, node_rates, usual_rate
from hpcrun.network.errors import NetworkError
from hpcrun.printing import escaped

if TYPE_CHECKING:
    from rich.table import Table

# From the part of the usual rate: colors of the terminal that most people can tell apart.
_COLORS = ((0.25, "red"), (0.5, "dark_orange"), (0.75, "yellow"), (float("inf"), "green"))


def matrix(nodes: Sequence[str], transfers: Sequence[Transfer]) -> list[list[float | None]]:
    """Return the rate from each node (row) to each node (column) in bit/s; None where none was measured.

    A connection that failed is 0.
    """
    rates = {(one.sender, one.receiver): one.rate or 0.0 for one in in_the_rounds(transfers)}
    return [[rates.get((sender, receiver)) for receiver in nodes] for sender in nodes]


def table(nodes: Sequence[str], transfers: Sequence[Transfer]) -> "Table":
    """Return the matrix for rich: a row a sender, a column a receiver, in Gbit/s."""
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


def write_png(path: Path, nodes: Sequence[str], transfers: Sequence[Transfer]) -> None:
    """Write the matrix as a picture.

    Raises:
        NetworkError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise NetworkError(
            f"{path}: a picture needs matplotlib; `pip install matplotlib`, or leave --png out"
        ) from error
    values = [
        [float("nan") if rate is None else rate / 1e9 for rate in row]
        for row in matrix(nodes, transfers)
    ]
    size = max(4.0, 0.4 * len(nodes) + 2)
    figure = Figure(figsize=(size + 1, size))
    axes = figure.add_subplot()
    image = axes.imshow(values, vmin=0, cmap="viridis")
    axes.set_xticks(range(len(nodes)), list(nodes), rotation=90)
    axes.set_yticks(range(len(nodes)), list(nodes))
    axes.set_xlabel("receiver")
    axes.set_ylabel("sender")
    figure.colorbar(image, label="Gbit/s")
    figure.tight_layout()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise NetworkError(f"{path}: cannot be written: {error}") from error
