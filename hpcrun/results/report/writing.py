"""Writing a report: everything is computed first, then each file is written atomically."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hpcrun.results.report.canvas import Drawing, save
from hpcrun.results.report.page.document import document
from hpcrun.results.report.panels import draw
from hpcrun.results.report.report_content import ReportRequest, collect
from hpcrun.results.report.runs import ReportError, counts
from hpcrun.results.report.sweep import several
from hpcrun.results.store import ResultsFile
from hpcrun.run.files import write_atomic

# Mark of a report of hpcrun, so that no other file is replaced by mistake.
_HEAD = "<!DOCTYPE html>"


@dataclass(frozen=True)
class WrittenReport:
    """A written report; ``words`` describe its content."""

    figures: Sequence[Drawing]
    words: str


def write_report(store: ResultsFile, request: ReportRequest, output: Path) -> WrittenReport:
    """Write the report of ``store`` to ``output``, atomically.

    Raises:
        ReportError: there are no runs.
        ResultsError: no run has the metric.
        OSError: the disk refused; ``output`` is unchanged.
    """
    # A diverged loss of 1e308 has an infinite mean, which the page shows.
    with np.errstate(all="ignore"):
        content = collect(store, request)
        figures = draw(content)
        page = document(content, figures)
    # A symbolic link stays: its target is replaced. The umask decides who may read.
    write_atomic(Path(os.path.realpath(output)), page, mode=0o666)
    states = ", ".join(f"{count:,} {state}" for state, count in counts(content.runs).items())
    drawn = figures.all()
    count, drawings = several(len(content.runs), "run"), several(len(drawn), "figure")
    return WrittenReport(drawn, f"{count} ({states}), {drawings}")


def write_figures(drawings: Sequence[Drawing], folder: Path) -> list[Path]:
    """Write each figure as PNG and PDF below ``folder``, which is made; raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    return [path for drawing in drawings for path in save(drawing, folder)]


def require_place(output: Path, figures: Path | None) -> None:
    """Raise ReportError before any work if the report cannot be written to its place.

    Raises:
        ReportError: a folder is missing, or a file of another kind is in the way.
    """
    if output.is_dir():
        raise ReportError(
            f"{output}: is a directory; name a file, such as {output / 'report.html'}"
        )
    if not output.absolute().parent.is_dir():
        raise ReportError(
            f"{output.absolute().parent}: no such directory; make it, or choose another -o"
        )
    if output.is_file() and not _is_page(output):
        raise ReportError(
            f"{output}: is not an HTML report, and would be replaced; choose another -o"
        )
    if figures is not None and os.path.lexists(figures) and not figures.is_dir():
        raise ReportError(f"--figures {figures}: is a file; name a folder")


def _is_page(path: Path) -> bool:
    with path.open("rb") as stream:
        head = stream.read(len(_HEAD)).decode(errors="replace")
    return not head or head.lower() == _HEAD.lower()
