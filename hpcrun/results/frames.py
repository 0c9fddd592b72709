"""results.h5 as tidy pandas frames."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from hpcrun.results import require
from hpcrun.results.collect.columns import counted, fields
from hpcrun.results.store import ResultsFile

if TYPE_CHECKING:
    import pandas as pd


def load_results(path: str | Path) -> Results:
    """Open the results.h5 at ``path`` for pandas; each method of the result returns one tidy frame.

    Raises:
        ResultsError: pandas is not installed, or the file is missing, damaged or of another layout.
    """
    require("tables", "pandas")
    return Results(Path(path))


class Results:
    """The frames of a results.h5. The column ``run`` is the same in all frames.

    Every method reads the file again, and raises ``ResultsError``, a UserError, if the file has gone or is
    damaged.

    Attributes:
        units: unit of each column that has one, such as ``{"step_time": "s", "memory_gb": "GB"}``.
    """

    def __init__(self, path: Path) -> None:
        """Check that ``path`` is a results file.

        Raises:
            ResultsError: the file is missing, damaged or of another layout.
        """
        self._path = path
        with ResultsFile(path) as store:
            self.units = store.units()

    def runs(self, *, config: bool = True) -> pd.DataFrame:
        """Return a row for each run: state, Unix times in seconds, and the config as columns (``train.lr``).

        Args:
            config: False: without the columns of the config.

        Raises:
            ResultsError: the file cannot be read.
        """
        import pandas as pd

        with ResultsFile(self._path) as store:
            frame = _frame(store.table("runs"))
            if not config:
                return frame
            values = [
                {
                    name: json.dumps(value) if isinstance(value, list | dict) else value
                    for name, value in store.config(key).items()
                }
                for key in frame["run"]
            ]
            return frame.join(pd.DataFrame(values, index=frame.index), rsuffix=".config")

    def metrics(
        self,
        runs: Iterable[str] | None = None,
        columns: Sequence[str] | None = None,
        *,
        overwritten: bool = False,
    ) -> pd.DataFrame:
        """Return a row for each logged line, with the columns ``run`` and ``step`` in front.

        Args:
            runs: keys of runs; all by default.
            columns: metrics; all by default. ``step`` is always included. A metric ``run`` becomes
                ``metrics.run``.
            overwritten: also return the steps that a restart has computed again.

        Raises:
            KeyError: the file has no such run.
            ResultsError: the file cannot be read.
        """
        with ResultsFile(self._path) as store:
            wanted = None if columns is None else {"step", *columns}
            return _joined(_parts(store, "metrics", runs, wanted, overwritten=overwritten))

    def events(self, runs: Iterable[str] | None = None) -> pd.DataFrame:
        """Return a row for each event, such as a start, a commit or an end.

        Args:
            runs: keys of runs; all by default.

        Raises:
            KeyError: the file has no such run.
            ResultsError: the file cannot be read.
        """
        with ResultsFile(self._path) as store:
            return _joined(_parts(store, "events", runs))

    def summary(self) -> pd.DataFrame:
        """Return last, lowest and highest value of each metric of each run, with their steps.

        Raises:
            ResultsError: the file cannot be read.
        """
        with ResultsFile(self._path) as store:
            return _frame(store.table("summary"))

    def problems(self) -> pd.DataFrame:
        """Return a row for each unfinished or damaged file of a run: run, file and problem.

        Raises:
            ResultsError: the file cannot be read.
        """
        with ResultsFile(self._path) as store:
            return _frame(store.table("problems"))

    def result(self, run: str) -> dict[str, Any]:
        """Return the result.json of the run with the key ``run``; empty without a result.

        Raises:
            KeyError: the file has no such run.
            ResultsError: the file cannot be read.
        """
        with ResultsFile(self._path) as store:
            return store.document(run, "result")


def _parts(
    store: ResultsFile,
    name: Literal["metrics", "events"],
    runs: Iterable[str] | None = None,
    wanted: set[str] | None = None,
    *,
    overwritten: bool = True,
) -> Iterator[pd.DataFrame]:
    """Yield the frame of each run that has ``name``."""
    for key in store.keys() if runs is None else runs:
        if key not in store.file["run"]:
            raise KeyError(key)
        records = store.metrics(key) if name == "metrics" else store.events(key)
        if records is None:
            continue
        keep = None if overwritten else counted(fields(records), len(records))
        frame = _frame(records if keep is None else records[keep], wanted)
        frame = frame.rename(columns={"run": "metrics.run"})
        frame.insert(0, "run", key)
        yield frame


def _joined(parts: Iterable[pd.DataFrame]) -> pd.DataFrame:
    import pandas as pd

    return pd.concat([pd.DataFrame({"run": []}, dtype=object), *parts], ignore_index=True)


def _frame(records: NDArray[Any], wanted: set[str] | None = None) -> pd.DataFrame:
    import pandas as pd

    columns = {
        name: [text.decode() for text in column.tolist()]
        if column.dtype.kind == "S"
        else np.ascontiguousarray(column)
        for name, column in fields(records).items()
        if wanted is None or name in wanted
    }
    return pd.DataFrame(columns)
