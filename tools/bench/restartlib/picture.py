"""The picture of the restarts: a bar for each system, from the fault to the end of the next step."""

from collections.abc import Mapping
from pathlib import Path

_STYLE = Path(__file__).with_name("picture.mplstyle")
_WORDS = {
    "end": "ranks end",
    "decide": "cause and decision",
    "start": "Slurm starts the processes",
    "import": "import",
    "join": "rendezvous",
    "restore": "build and restore",
    "step": "first step",
}
"""The label of each part of a restart."""


def draw(medians: Mapping[tuple[str, str], Mapping[str, float]], path: Path) -> None:
    """Draw the seconds of each part; needs matplotlib.

    Args:
        medians: the seconds of each part by case and system; parts of other names are left out.
        path: the picture, in the format of its suffix.
    """
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    with plt.style.context(["default", str(_STYLE), {"font.family": "DejaVu Sans"}]):
        figure, axes = plt.subplots(figsize=(7.2, 0.7 + 0.32 * len(medians)), layout="constrained")
        rows = list(reversed(medians))
        before = [0.0] * len(rows)
        colors = ["646c76", *(one["color"] for one in plt.rcParams["axes.prop_cycle"])]
        for (part, words), color in zip(_WORDS.items(), colors, strict=True):
            lengths = [medians[row].get(part, 0.0) for row in rows]
            axes.barh(
                range(len(rows)), lengths, left=before, label=words, color=f"#{color.lstrip('#')}"
            )
            before = [old + length for old, length in zip(before, lengths, strict=True)]
        for number, total in enumerate(before):
            axes.text(total, number, f"  {total:.1f} s", va="center")
        axes.set_yticks(range(len(rows)), [f"{case}, {system}" for case, system in rows])
        axes.set_xlabel("seconds from the fault to the end of the next step")
        axes.set_xlim(0, max(before) * 1.1)
        axes.grid(axis="y", visible=False)
        figure.legend(loc="outside upper center", ncols=4)
        figure.savefig(path, dpi=150, facecolor="white")
        plt.close(figure)
