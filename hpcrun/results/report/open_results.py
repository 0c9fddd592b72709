"""The named runs as an open results file."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hpcrun.results.collect.aggregate import RunSource, aggregate
from hpcrun.results.collect.find import find_runs
from hpcrun.results.report.errors import ReportError
from hpcrun.results.store import ResultsFile

_FILES = (".h5", ".hdf5")


@contextmanager
def open_results(named: Sequence[str], runs_dir: Path) -> Iterator[ResultsFile]:
    """Yield the results of ``named``: one results file, or run directories and folders of them.

    Directories are first collected into a temporary results file, so that both sources give the same figures.

    Raises:
        ReportError: a results file is named together with another source.
        ResultsError: a source holds no runs.
    """
    files = [name for name in named if _is_file(name)]
    if files and len(named) > 1:
        raise ReportError(
            f"{files[0]}: is a results file, and takes no other source; collect all runs into one file "
            "with `hpcrun aggregate`"
        )
    if files:
        with ResultsFile(Path(files[0])) as store:
            yield store
        return
    found = RunSource(find_runs(named or [str(runs_dir)], runs_dir))
    with tempfile.TemporaryDirectory(prefix="hpcrun-report-") as folder:
        path = Path(folder) / "results.h5"
        aggregate(found, path, processes=0)
        with ResultsFile(path) as store:
            yield store


def _is_file(name: str) -> bool:
    path = Path(name)
    return path.is_file() or (not path.is_dir() and path.suffix in _FILES)
