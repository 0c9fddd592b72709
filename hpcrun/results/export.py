"""results.h5 as CSV or Parquet: a table for the runs, one for the metrics, one for the events."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

from hpcrun.errors import ResultsError
from hpcrun.results.config_text import flat
from hpcrun.results.frames import beside_run, config_of, fields
from hpcrun.results.store import ResultsFile
from hpcrun.run.files import sync_directory

# Rows of a table in memory, and of a row group.
_ROWS = 200_000
Records = dict[str, NDArray[Any]]


def write_csv(store: ResultsFile, folder: Path) -> list[Path]:
    """Write ``runs.csv``, ``metrics.csv`` and ``events.csv``; returns their paths. Raises OSError."""
    return [_atomic(folder / f"{name}.csv", _csv_writer(name, store)) for name in _TABLES]


def write_parquet(store: ResultsFile, folder: Path) -> list[Path]:
    """Write ``runs.parquet``, ``metrics.parquet`` and ``events.parquet``; returns their paths.

    Raises:
        ResultsError: pyarrow is not installed.
        OSError: the disk refused.
    """
    require_pyarrow()
    return [_atomic(folder / f"{name}.parquet", _parquet_writer(name, store)) for name in _TABLES]


def require_pyarrow() -> None:
    """Raise ResultsError if pyarrow is not installed."""
    try:
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise ResultsError(
            "Parquet needs pyarrow: `pip install pyarrow`, or write CSV with --csv"
        ) from error


def _atomic(path: Path, write: Callable[[Path], None]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.urandom(6).hex()}.tmp")
    try:
        write(temporary)
        descriptor = os.open(temporary, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        temporary.replace(path)
    finally:
        with suppress(FileNotFoundError):
            temporary.unlink()
    sync_directory(path.parent)
    return path


def _csv_writer(name: str, store: ResultsFile) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        kinds = _kinds(name, store)
        with path.open("x", encoding="utf-8", newline="") as stream:
            _write_rows(stream, list(kinds), _parts(name, store))

    return write


def _write_rows(stream: TextIO, names: Sequence[str], parts: Iterator[Records]) -> None:
    writer = csv.writer(stream)
    writer.writerow(names)
    for part in parts:
        rows = len(next(iter(part.values())))
        columns = [_csv_column(part.get(name), rows) for name in names]
        writer.writerows(zip(*columns, strict=True))


def _csv_column(column: NDArray[Any] | None, rows: int) -> list[Any]:
    if column is None:
        return [""] * rows
    if column.dtype.kind == "S":
        return [text.decode() for text in column.tolist()]
    if column.dtype.kind == "f":
        # Every reader understands an empty cell as a missing number.
        return ["" if value != value else value for value in column.tolist()]
    return list(column.tolist())


def _parquet_writer(name: str, store: ResultsFile) -> Callable[[Path], None]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    types = {
        "S": pa.string(),
        "f": pa.float64(),
        "i": pa.int64(),
        "u": pa.uint64(),
        "b": pa.bool_(),
    }

    def write(path: Path) -> None:
        kinds = _kinds(name, store)
        units = store.units()
        schema = pa.schema(
            [
                pa.field(
                    column,
                    types[kind],
                    metadata={"unit": units[column]} if column in units else None,
                )
                for column, kind in kinds.items()
            ]
        )
        with pq.ParquetWriter(path, schema) as writer:
            for group in _batches(_parts(name, store)):
                tables = [
                    pa.table(
                        [_arrow(part, field.name, field.type) for field in schema], schema=schema
                    )
                    for part in group
                ]
                writer.write_table(pa.concat_tables(tables))

    return write


def _arrow(part: Records, name: str, kind: Any) -> Any:
    import pyarrow as pa

    column = part.get(name)
    if column is None:
        return pa.nulls(len(next(iter(part.values()))), kind)
    if column.dtype.kind == "S":
        return pa.array([text.decode() for text in column.tolist()], pa.string())
    values = np.ascontiguousarray(column)
    if pa.types.is_string(kind):
        return pa.array([str(value) for value in values.tolist()], kind)
    # NaN means a missing value or a non-finite value.
    return pa.array(values.astype(kind.to_pandas_dtype()), kind, from_pandas=True)


def _batches(parts: Iterator[Records]) -> Iterator[list[Records]]:
    group: list[Records] = []
    rows = 0
    for part in parts:
        group.append(part)
        rows += len(next(iter(part.values())))
        if rows >= _ROWS:
            yield group
            group, rows = [], 0
    if group:
        yield group


def _kinds(name: str, store: ResultsFile) -> dict[str, str]:
    """Return the columns of a table over all runs, and the kind that holds the values of all."""
    found: dict[str, str] = {}
    for part in _TABLES[name](store, True):
        for column, values in part.items():
            kind = values.dtype.kind
            before = found.setdefault(column, kind)
            if before != kind:
                found[column] = "S" if "S" in (before, kind) else "f"
    return found


def _parts(name: str, store: ResultsFile) -> Iterator[Records]:
    return _TABLES[name](store, False)


def _runs(store: ResultsFile, _types_only: bool) -> Iterator[Records]:
    table = fields(store.table("runs"))
    configs = [flat(config_of(store, key)) for key in store.keys()]  # noqa: SIM118
    keys = dict.fromkeys(key for config in configs for key in config)
    for key in keys:
        values = [config.get(key) for config in configs]
        table[key if key not in table else f"config.{key}"] = _config_column(values)
    yield table


def _config_column(values: list[Any]) -> NDArray[Any]:
    kinds = set(map(type, values))
    if kinds <= {int, float, type(None)} and kinds != {type(None)}:
        return np.array([np.nan if value is None else value for value in values], np.float64)
    if kinds == {bool}:
        return np.array(values, bool)
    texts = [
        "" if value is None else value if isinstance(value, str) else json.dumps(value)
        for value in values
    ]
    return np.array([text.encode() for text in texts] or [b""])


def _metrics(store: ResultsFile, types_only: bool) -> Iterator[Records]:
    return _of_runs(store, "metrics", types_only)


def _events(store: ResultsFile, types_only: bool) -> Iterator[Records]:
    return _of_runs(store, "events", types_only)


def _of_runs(store: ResultsFile, name: str, types_only: bool) -> Iterator[Records]:
    for key in store.keys():  # noqa: SIM118
        group = store.file["run"][key]
        if name not in group:
            continue
        records = np.empty(0, group[name].dtype) if types_only else group[name][:]
        run = np.full(len(records), key.encode(), f"S{len(key.encode())}")
        yield {
            "run": run,
            **{beside_run(column): values for column, values in fields(records).items()},
        }


_TABLES = {"runs": _runs, "metrics": _metrics, "events": _events}
