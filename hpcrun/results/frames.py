"""results.h5 as tidy pandas frames, and as CSV or Parquet."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from hpcrun.results import require
from hpcrun.results.collect.columns import counted, fields
from hpcrun.results.store import ResultsFile
from hpcrun.run.files import sync_directory

if TYPE_CHECKING:
    import pandas as pd

# Rows of a row group of Parquet.
_ROWS = 200_000


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


def write_tables(path: Path, folder: Path, suffix: Literal["csv", "parquet"]) -> list[Path]:
    """Write the runs, metrics and events of ``path``, each as one file below ``folder``.

    Raises:
        ResultsError: pandas or pyarrow is not installed.
        OSError: the disk refused.
    """
    results = load_results(path)
    write = _write_csv if suffix == "csv" else _write_parquet
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    with ResultsFile(path) as store:
        tables: dict[str, Callable[[], Iterator[pd.DataFrame]]] = {
            "runs": lambda: iter([_plain(results.runs())]),
            "metrics": lambda: _parts(store, "metrics"),
            "events": lambda: _parts(store, "events"),
        }
        for name, parts in tables.items():
            target = folder / f"{name}.{suffix}"
            temporary = folder / f".{target.name}.{os.urandom(6).hex()}.tmp"
            try:
                write(temporary, parts, results.units)
                with temporary.open("rb") as stream:
                    os.fsync(stream.fileno())
                temporary.replace(target)
            finally:
                with suppress(FileNotFoundError):
                    temporary.unlink()
            written.append(target)
    sync_directory(folder)
    return written


def _plain(frame: pd.DataFrame) -> pd.DataFrame:
    """Return a frame in which a column of values of several types has JSON texts."""
    for name, column in frame.items():
        if column.dtype == object and len(set(map(type, column))) > 1:
            frame[name] = [
                value if value is None or isinstance(value, str) else json.dumps(value)
                for value in column.where(column.notna(), None)
            ]
    return frame


def _types(parts: Iterator[pd.DataFrame]) -> dict[str, Any]:
    """Return the columns of all parts, each with a type that holds the values of all."""
    found: dict[str, Any] = {}
    for part in parts:
        for name, kind in part.dtypes.items():
            before = found.setdefault(name, kind)
            if before != kind:
                found[name] = np.dtype(object if object in (before, kind) else float)
    return found


def _write_csv(path: Path, parts: Callable[[], Iterator[pd.DataFrame]], _: dict[str, str]) -> None:
    names = list(_types(parts()))
    with path.open("x", encoding="utf-8", newline="") as stream:
        for number, part in enumerate(parts()):
            # Of a run alone: whole numbers stay whole where another run lacks the column.
            part.reindex(columns=names).to_csv(stream, index=False, header=not number)


def _write_parquet(
    path: Path, parts: Callable[[], Iterator[pd.DataFrame]], units: dict[str, str]
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    kinds = _types(parts())
    columns = [
        pa.field(
            name,
            pa.string() if kind.kind == "O" else pa.from_numpy_dtype(kind),
            metadata={"unit": units[name]} if name in units else None,
        )
        for name, kind in kinds.items()
    ]
    schema = pa.schema(columns)
    with pq.ParquetWriter(path, schema) as writer:
        held: list[Any] = []
        for part in parts():
            texts = [name for name in part if kinds[name].kind == "O" != part[name].dtype.kind]
            part = part.astype(dict.fromkeys(texts, str)).reindex(columns=list(kinds))
            held.append(pa.Table.from_pandas(part, schema, preserve_index=False))
            if sum(map(len, held)) >= _ROWS:
                writer.write_table(pa.concat_tables(held))
                held = []
        if held:
            writer.write_table(pa.concat_tables(held))
