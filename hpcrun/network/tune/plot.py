"""A picture of the bus bandwidths; needs matplotlib."""

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpcrun.errors import NetworkError
from hpcrun.network.tune.cells import Cell, Trial, bandwidths
from hpcrun.network.tune.decision import median_time


def write_png(path: Path, series: Mapping[str, Sequence[Trial]], ranks: int) -> None:
    """Draw busbw over the size, a panel for each collective and a line for each of ``series``.

    Raises:
        NetworkError: matplotlib is not installed, or the file cannot be written.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    cells = {name: _cells(trials) for name, trials in series.items()}
    names = sorted({cell.collective for found in cells.values() for cell in found})
    figure = Figure(figsize=(4 * max(1, len(names)), 3.5))
    panels = figure.subplots(1, max(1, len(names)), squeeze=False)[0]
    for panel, name in zip(panels, names, strict=False):
        for label, found in cells.items():
            mine = [cell for cell in found if cell.collective == name]
            rates = [
                bandwidths(cell, median_time(series[label], cell), ranks)[1] / 1e9 for cell in mine
            ]
            panel.plot([cell.size for cell in mine], rates, marker="o", label=label)
        panel.set(title=name, xlabel="bytes", xscale="log", yscale="log")
    panels[0].set_ylabel("busbw, GB/s")
    panels[0].legend()
    figure.tight_layout()
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise NetworkError(f"{path}: cannot be written: {error}") from error


def require_matplotlib() -> None:
    """Raise NetworkError if matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise NetworkError("--png needs matplotlib: `pip install matplotlib`, or omit --png")


def _cells(trials: Sequence[Trial]) -> list[Cell]:
    working = [trial for trial in trials if not trial.problem]
    return sorted(set.intersection(*(set(trial.timings) for trial in working))) if working else []
