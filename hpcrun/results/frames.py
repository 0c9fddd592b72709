"""results.h5 as tidy pandas frames, and as CSV or Parquet."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from hpcrun.drafts import draft_folder, sync
from hpcrun.errors import ResultsError
from hpcrun.results import require
from hpcrun.results.collect.columns import counted, fields
from hpcrun.results.store import ResultsFile

if TYPE_CHECKING:
    import pandas as pd

# The partition of the runs outside of sweeps: pandas cannot read a partition without a name.
_NO_SWEEP = "none"
_NULLABLE = {"i": "Int64", "u": "UInt64", "b": "boolean"}


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

        A key of the config with the name of another column gets ``.config`` after it.

        Args:
            config: False: without the columns of the config.
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
            found = pd.DataFrame(values, index=frame.index)
            taken = {*frame.columns, *found.columns}
            renamed = {}
            for name in found.columns.intersection(frame.columns):
                own = f"{name}.config"
                while own in taken:
                    own += ".config"
                renamed[name] = own
                taken.add(own)
            return frame.join(found.rename(columns=renamed))

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
        """
        with ResultsFile(self._path) as store:
            wanted = None if columns is None else {"step", *columns}
            return _rows(store, "metrics", runs, wanted, overwritten=overwritten)

    def events(self, runs: Iterable[str] | None = None) -> pd.DataFrame:
        """Return a row for each event, such as a start, a commit or an end.

        Args:
            runs: keys of runs; all by default.

        Raises:
            KeyError: the file has no such run.
        """
        with ResultsFile(self._path) as store:
            return _rows(store, "events", runs)

    def summary(self) -> pd.DataFrame:
        """Return last, lowest and highest value of each metric of each run, with their steps."""
        with ResultsFile(self._path) as store:
            return _frame(store.table("summary"))

    def problems(self) -> pd.DataFrame:
        """Return a row for each unfinished or damaged file of a run: run, file and problem."""
        with ResultsFile(self._path) as store:
            return _frame(store.table("problems"))

    def columns(self) -> pd.DataFrame:
        """Return the data dictionary: unit, meaning and source of each column of each table."""
        with ResultsFile(self._path) as store:
            return _frame(store.table("columns"))

    def result(self, run: str) -> dict[str, Any]:
        """Return the result.json of the run with the key ``run``; empty without a result.

        Raises:
            KeyError: the file has no such run.
        """
        with ResultsFile(self._path) as store:
            return store.document(run, "result")


def _rows(
    store: ResultsFile,
    name: Literal["metrics", "events"],
    runs: Iterable[str] | None = None,
    wanted: set[str] | None = None,
    *,
    overwritten: bool = True,
    nullable: bool = False,
) -> pd.DataFrame:
    """Return the rows of all runs.

    Args:
        nullable: whole numbers stay whole where another run lacks the column.
    """
    import pandas as pd

    # A frame takes a millisecond: runs of equal columns are converted together.
    groups: dict[Any, list[tuple[str, NDArray[np.int64], NDArray[Any]]]] = {}
    total = 0
    for key in store.keys() if runs is None else runs:
        # The second to fourth columns show which rows a restart has computed again.
        read = None if wanted is None else {*wanted, "step", "restart", "in_place"}
        records = store.part(key, name, read)
        if records is None:
            if key not in store.file["run"]:
                raise KeyError(key)
            continue
        keep = None if overwritten else counted(fields(records), len(records))
        records = records if keep is None else records[keep]
        at = np.arange(total, total + len(records))
        groups.setdefault(records.dtype, []).append((key, at, records))
        total += len(records)
    frames = []
    for parts in groups.values():
        keys, places, arrays = zip(*parts, strict=True)
        frame = _frame(np.concatenate(arrays), wanted)
        frame = frame.rename(columns={column: f"metrics.{column}" for column in ("run", "sweep")})
        frame.insert(0, "run", np.repeat(np.array(keys, object), list(map(len, arrays))))
        frame.index = np.concatenate(places)
        kinds = {name: _NULLABLE.get(kind.kind, kind) for name, kind in frame.dtypes.items()}
        frames.append(frame.astype(kinds) if nullable else frame)
    return pd.concat(frames).sort_index() if frames else pd.DataFrame({"run": []}, dtype=object)


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


def write_tables(path: Path, kind: Literal["csv", "parquet"]) -> Path:
    """Write the tables of ``path`` into a folder next to it, and return the folder.

    Parquet has a folder for the metrics and events of each sweep, such as ``metrics/sweep=gpt``. The
    tables are in memory before the folder is replaced.

    Raises:
        ResultsError: pandas or pyarrow is not installed, or the folder has files of another program.
        OSError: the disk refused.
    """
    folder = path.with_name(f"{path.stem}-{kind}")
    if os.path.lexists(folder):
        found = {path.stem for path in folder.iterdir()} if folder.is_dir() else {""}
        if not found <= {"runs", "metrics", "events", "columns"}:
            raise ResultsError(f"{folder}: is not a folder of tables by hpcrun; move it away")
    results = load_results(path)
    runs = results.runs()
    with ResultsFile(path) as store, draft_folder(folder) as draft:
        new = draft / "new"
        new.mkdir()
        sweeps = dict(zip(runs["run"], runs["sweep"], strict=True))
        frames = {"runs": runs, "columns": results.columns()}
        for name in ("metrics", "events"):
            frames[name] = _rows(store, name, nullable=True)
            frames[name]["sweep"] = frames[name]["run"].map(sweeps).replace("", _NO_SWEEP)
        for name, frame in frames.items():
            whole = _plain(frame)
            if kind == "csv":
                whole.to_csv(new / f"{name}.csv", index=False)
            elif name in ("runs", "columns"):
                whole.to_parquet(new / f"{name}.parquet", index=False)
            else:
                whole.to_parquet(new / name, index=False, partition_cols=["sweep"])
        for entry in (*new.rglob("*"), new):
            sync(entry)
        if folder.exists():
            folder.rename(draft / "old")
        new.rename(folder)
    sync(folder.parent)
    return folder


def _plain(frame: pd.DataFrame) -> pd.DataFrame:
    """Return a frame in which a column of values of several types has JSON texts."""
    for name, column in frame.items():
        if column.dtype == object and len(set(map(type, column))) > 1:
            frame[name] = [
                value if value is None or isinstance(value, str) else json.dumps(value, default=str)
                for value in column.astype(object).where(column.notna(), None)
            ]
    return frame
