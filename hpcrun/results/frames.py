"""Tidy pandas frames from results.h5."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hpcrun.errors import ResultsError
from hpcrun.results.collect.summary import counted
from hpcrun.results.config_text import flat
from hpcrun.results.store import ResultsFile

if TYPE_CHECKING:
    import pandas as pd


def load_results(path: str | Path) -> Results:
    """Open the results.h5 at ``path`` for pandas; each method of the result returns one tidy frame.

    Raises:
        ResultsError: pandas is not installed, or the file is missing, damaged or of another layout.
    """
    try:
        import pandas  # noqa: F401
    except ImportError as error:
        raise ResultsError(
            "pandas is not installed: `pip install pandas`; h5py reads the file without it"
        ) from error
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
                {key: _cell(value) for key, value in flat(config_of(store, key)).items()}
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
        import pandas as pd

        wanted = None if columns is None else {"step", *columns}
        parts = []
        with ResultsFile(self._path) as store:
            for key in store.keys() if runs is None else runs:
                records = store.metrics(key)
                if records is None:
                    continue
                names = [
                    name for name in records.dtype.names or () if wanted is None or name in wanted
                ]
                keep = None if overwritten else counted(fields(records), len(records))
                kept = records if keep is None else records[keep]
                part = pd.DataFrame({beside_run(name): _plain(kept[name]) for name in names})
                part.insert(0, "run", key)
                parts.append(part)
        if not parts:
            return pd.DataFrame({"run": []})
        return pd.concat(parts, ignore_index=True)

    def events(self, runs: Iterable[str] | None = None) -> pd.DataFrame:
        """Return a row for each event, such as a start, a commit or an end.

        Args:
            runs: keys of runs; all by default.

        Raises:
            KeyError: the file has no such run.
            ResultsError: the file cannot be read.
        """
        import pandas as pd

        parts = []
        with ResultsFile(self._path) as store:
            for key in store.keys() if runs is None else runs:
                records = store.events(key)
                if records is not None:
                    part = _frame(records)
                    part.insert(0, "run", key)
                    parts.append(part)
        return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame({"run": []})

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
            raw = store.document(run, "result")
        return json.loads(raw) if raw else {}


def config_of(store: ResultsFile, key: str) -> dict[str, Any]:
    """Return the config of a run as nested values.

    A run of a sweep of a command also has the values of the placeholders, and its command has the
    placeholders: the runs of the sweep have one command.
    """
    return with_parameters(store, key, own_config(store, key))


def own_config(store: ResultsFile, key: str) -> dict[str, Any]:
    """Return the config of a run as nested values, with the command as it ran."""
    raw = store.document(key, "config")
    values: dict[str, Any] = json.loads(raw) if raw else {}
    return values


def with_parameters(store: ResultsFile, key: str, values: dict[str, Any]) -> dict[str, Any]:
    """Return the config ``values`` of a run as :func:`config_of` does."""
    if not values.get("command"):
        return values
    identity = store.document(key, "identity")
    swept = json.loads(identity).get("sweep") if identity else None
    if not isinstance(swept, dict) or not isinstance(swept.get("values"), dict):
        return values
    known = flat(values)
    own = {name: value for name, value in swept["values"].items() if name not in known}
    return values | own | {"command": swept.get("command", values["command"])}


def fields(records: NDArray[Any]) -> dict[str, NDArray[Any]]:
    """Return the columns of records by name."""
    return {name: records[name] for name in records.dtype.names or ()}


def beside_run(metric: str) -> str:
    """Return the column of a metric in a table whose column ``run`` is the key of the run."""
    return "metrics.run" if metric == "run" else metric


def _frame(records: NDArray[Any]) -> pd.DataFrame:
    import pandas as pd

    return pd.DataFrame({name: _plain(column) for name, column in fields(records).items()})


def _plain(column: NDArray[Any]) -> Any:
    if column.dtype.kind == "S":
        return [text.decode() for text in column.tolist()]
    return np.ascontiguousarray(column)


def _cell(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, list | dict) else value
