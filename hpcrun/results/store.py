"""results.h5: its tables, a reader, and a writer that replaces the whole file.

The file begins with a user block, which HDF5 does not read: it has the SHA-256 of all other bytes. A reader
checks it before HDF5 sees the file. For other programs, each column of numbers has a checksum of its own
(Fletcher-32).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import h5py
import numpy as np
import yaml
from h5py import h5d, h5g, h5o
from numpy.typing import NDArray

from hpcrun.drafts import SPECIAL, is_special
from hpcrun.errors import ResultsError
from hpcrun.results.collect.columns import (
    ParsedLines,
    columns_of,
    flat,
    joined_lines,
    structured,
    texts,
)
from hpcrun.results.datasets import TableReader, TableWriter
from hpcrun.run.files import open_regular

if TYPE_CHECKING:
    from hpcrun.results.collect.run_reader import RunData

Described = tuple[str, str, str]
"""Unit, meaning and source of a column."""

FORMAT = "hpcrun results"
VERSION = 4
_TABLES_OF_RECORDS = 3
"""The layout before: each table is one dataset of records, and its texts have one width."""
TABLES = ("runs", "summary", "files", "problems")
DOCUMENTS = ("config", "identity", "result")
# h5dump 1.10 and later read it.
_LIBVER = ("v110", "v110")
# The smallest user block of HDF5.
_BLOCK = 512
_READ = 1 << 20
# Configs that are objects at a time.
_BATCH = 1000
# Bytes of a group with its links, and of the head of a dataset.
_OVERHEAD, _HEAD = 4000, 400


class ResultsFile:
    """A results.h5 opened for reading. The file is never changed in place, so it needs no lock."""

    def __init__(self, path: Path) -> None:
        """Open ``path``.

        Raises:
            ResultsError: the file is missing, damaged, or not a results file of this version.
        """
        self.path = path
        again = "move it away, and make it again with `hpcrun aggregate`"
        damaged = f"is damaged, or another program has changed it (its checksum is wrong); {again}"
        self._reader = TableReader()
        if is_special(path.resolve()):
            raise ResultsError(f"{path}: {SPECIAL}; choose another name")
        try:
            with open_regular(path) as stream:
                head = stream.read(_BLOCK)
                intact = head == _user_block(stream)
            if head.startswith(FORMAT.encode()) and not intact:
                raise ResultsError(f"{path}: {damaged}")
            self.file: Any = h5py.File(path, "r", locking=False)
        except FileNotFoundError:
            what = f"no such file; `hpcrun aggregate RUNS -o {path}` makes it"
            raise ResultsError(f"{path}: {what}") from None
        except IsADirectoryError:
            what = f"is a folder, and no results file; `hpcrun aggregate {path} -o results.h5` makes one"
            raise ResultsError(f"{path}: {what}") from None
        except OSError as error:
            what = f"is not an HDF5 file, or is damaged ({' '.join(str(error).split())})"
            raise ResultsError(f"{path}: {what}; move it away, or choose another name") from None
        wrong = None if intact else damaged
        self.layout = layout = int(self.file.attrs.get("layout_version", 0))
        if layout not in (_TABLES_OF_RECORDS, VERSION):
            wrong = (
                f"has layout {layout}, and this version of hpcrun reads layout {VERSION}; {again}"
            )
        if self.file.attrs.get("format") != FORMAT:
            wrong = "is an HDF5 file, but not one of hpcrun's results; choose another name"
        if wrong is not None:
            self.file.close()
            raise ResultsError(f"{path}: {wrong}")

    def __enter__(self) -> ResultsFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def table(self, name: str) -> NDArray[Any]:
        """Return a whole table; its texts are UTF-8 bytes.

        Raises:
            KeyError: the file has no such table.
        """
        found = self._table(name)
        if found is None:
            raise KeyError(name)
        return found

    def keys(self) -> list[str]:
        """Return the keys of all runs, in the order of the table ``runs``."""
        runs = self._table("runs", {"run"})
        return [] if runs is None else list(map(bytes.decode, runs["run"].tolist()))

    def metrics(self, key: str) -> NDArray[Any] | None:
        """Return a run's metrics, or None if the run has none."""
        return self.part(key, "metrics")

    def part(
        self, key: str, name: str, wanted: Collection[str] | None = None
    ) -> NDArray[Any] | None:
        """Return a table of a run, or None if the run has none.

        Args:
            wanted: columns; all by default.
        """
        return self._table(f"run/{key}/{name}", wanted)

    def _table(self, path: str, wanted: Collection[str] | None = None) -> NDArray[Any] | None:
        if self.layout == VERSION:
            return self._reader.table(self.file.id, path, wanted)
        try:
            return self._reader.dataset(h5d.open(self.file.id, path.encode()))
        except KeyError:
            return None

    def text(self, key: str, name: str) -> bytes | None:
        """Return the JSON of a run's document, or None if the run has none."""
        try:
            found = self._reader.dataset(h5d.open(self.file.id, f"run/{key}/{name}".encode()))
        except KeyError:
            return None
        return bytes(found.reshape(-1)[0])

    def document(self, key: str, name: str) -> dict[str, Any]:
        """Return a run's ``config``, ``identity`` or ``result``; empty if the run has none.

        Raises:
            KeyError: the file has no such run.
        """
        raw = self.text(key, name)
        if raw is None and key not in self.file["run"]:
            raise KeyError(key)
        value = {} if raw is None else json.loads(raw)
        return value if isinstance(value, dict) else {}

    def config(self, key: str) -> dict[str, Any]:
        """Return the config of a run with dotted keys.

        A run of a sweep of a command also has the values of the placeholders, and its command has the
        placeholders: the runs of the sweep have one command.
        """
        return _with_swept(self.document(key, "config"), self.document(key, "identity"))

    def columns(self) -> dict[tuple[str, str], Described]:
        """Return unit, meaning and source of each column of each table."""
        cells = [tuple(map(bytes.decode, row)) for row in self.table("columns").tolist()]
        return {
            (name, column): (unit, meaning, source) for name, column, unit, meaning, source in cells
        }

    def units(self) -> dict[str, str]:
        """Return the unit of each column that has one."""
        return {column: unit for (_, column), (unit, *_) in self.columns().items() if unit}


def _with_swept(config: Mapping[str, Any], identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with dotted keys, and with the values of the placeholders of its command."""
    values = flat(config)
    swept = identity.get("sweep") if values.get("command") else None
    if not isinstance(swept, dict) or not isinstance(swept.get("values"), dict):
        return values
    own = {name: value for name, value in swept["values"].items() if name not in values}
    return values | own | {"command": swept.get("command", values["command"])}


@cache
def dictionary() -> dict[str, dict[str, list[str]]]:
    """Return type, unit, meaning and source of the columns that hpcrun writes into each table."""
    raw = Path(__file__).with_name("columns.yaml").read_text(encoding="utf-8")
    found: dict[str, dict[str, list[str]]] = yaml.safe_load(raw)
    return found


class _Configs:
    """Collects the configs of all runs as the table ``config``: a column for each dotted key."""

    def __init__(self) -> None:
        self._rows: list[dict[str, Any]] = []
        self._parts: list[ParsedLines] = []

    def add(self, key: str, documents: Mapping[str, bytes]) -> None:
        """Add the config among the JSON documents of the run ``key``."""
        found = [json.loads(documents.get(name, b"{}")) for name in ("config", "identity")]
        config, identity = (one if isinstance(one, dict) else {} for one in found)
        values = _with_swept(config, identity)
        if "run" in values:
            values["run.config"] = values.pop("run")
        self._rows.append({"run": key, **values})
        if len(self._rows) == _BATCH:
            self._flush()

    def table(self) -> NDArray[Any]:
        """Return a row for each run, in the order of the table ``runs``."""
        self._flush()
        lines = joined_lines(self._parts)
        records = structured(lines.columns or {"run": np.empty(0, "S1")}, lines.rows)
        return records[np.argsort(records["run"], kind="stable")]

    def _flush(self) -> None:
        self._parts.append(columns_of(self._rows))
        self._rows = []


class Draft:
    """A new results.h5: runs, then :meth:`finish`."""

    def __init__(self, path: Path) -> None:
        """Open an empty file, or the file that the caller made."""
        self._path = path
        self._writer = TableWriter()
        self._known: set[Any] = set()
        self._configs = _Configs()
        self._columns: dict[tuple[str, str], Described] = {
            (name, column): (unit, meaning, source)
            for name in (*TABLES, "columns")
            for column, (_, unit, meaning, source) in dictionary()[name].items()
        }
        self._file = h5py.File(path, "w", libver=_LIBVER, locking=False, userblock_size=_BLOCK)
        # In the order of the run's names, which is not the order in which they are written.
        self._runs = self._file.create_group("run").id

    def put(self, key: str, data: RunData) -> int:
        """Write a run and return the bytes that it takes.

        Raises:
            ResultsError: a column has another unit than in another run.
        """
        group = h5g.create(self._runs, key.encode())
        size = _OVERHEAD
        for name, records in (("metrics", data.metrics), ("events", data.events)):
            if records is not None:
                if data.described or records.dtype not in self._known:
                    self._known.add(records.dtype)
                    self._describe(name, records.dtype.names or (), data)
                size += self._table(group, name, records) + _HEAD * len(records.dtype.names or ())
        for name, raw in data.documents.items():
            size += self._writer.document(group, name, raw) + _HEAD
        self._configs.add(key, data.documents)
        return size

    def _describe(self, name: str, columns: Iterable[str], data: RunData) -> None:
        """Add the columns of a table of a run to the data dictionary."""
        for column in columns:
            per_second = "1/s" if column.endswith("_per_second") else ""
            _, *known = dictionary()[name].get(column, ("", per_second, "", "metrics.jsonl"))
            own = data.described.get(column) if name == "metrics" else None
            # The step_time of another program may have another unit.
            if own is not None:
                known = [*known[:2], own[2]] if column in ("step", "time") else [*own]
            unit, meaning, source = known
            before = self._columns.setdefault((name, column), (unit, meaning, source))
            if unit and before[0] not in ("", unit):
                raise ResultsError(
                    f"{data.path}: {column} has the unit {unit}, and {before[0]} in other runs; declare one "
                    "in `units` of the mapping, and read all runs with --fresh"
                )
            self._columns[name, column] = (unit or before[0], before[1], before[2])

    def copy(self, source: ResultsFile, keys: Iterable[str]) -> None:
        """Copy runs from another file, with the dictionary of its columns."""
        self._columns |= source.columns()
        for key in keys:
            texts_of = {name: source.text(key, name) for name in DOCUMENTS}
            documents = {name: raw for name, raw in texts_of.items() if raw is not None}
            self._configs.add(key, documents)
            if source.layout == VERSION:
                h5o.copy(source.file["run"].id, key.encode(), self._runs, key.encode())
                continue
            group = h5g.create(self._runs, key.encode())
            for name in ("metrics", "events"):
                if (records := source.part(key, name)) is not None:
                    self._table(group, name, records)
            for name, raw in documents.items():
                self._writer.document(group, name, raw)

    def finish(self, tables: Mapping[str, NDArray[Any]]) -> None:
        """Write the tables of all runs and the checksum; raises OSError."""
        columns = table("columns", [(*key, *found) for key, found in self._columns.items()])
        written = {**tables, "columns": columns, "config": self._configs.table()}
        for name, records in written.items():
            self._table(self._file.id, name, records)
        self._file.attrs.update(
            {
                "format": FORMAT,
                "layout_version": VERSION,
                "hpcrun_version": package_version("hpcrun"),
                "h5py_version": h5py.version.version,
                "hdf5_version": h5py.version.hdf5_version,
                "numpy_version": np.__version__,
                "written": time.time(),
            }
        )
        self._file.close()
        with self._path.open("r+b") as stream:
            stream.seek(_BLOCK)
            block = _user_block(stream)
            stream.seek(0)
            stream.write(block)

    def close(self) -> None:
        """Close the file."""
        # A full disk fails the last write of HDF5 as well.
        with contextlib.suppress(OSError, RuntimeError):
            self._file.close()

    def _table(self, group: Any, name: str, records: NDArray[Any]) -> int:
        units = {
            column: self._columns[name, column][0]
            for column in records.dtype.names or ()
            if (name, column) in self._columns
        }
        return self._writer.table(group, name, records, units)


def _user_block(stream: BinaryIO) -> bytes:
    """Return the user block for the bytes that ``stream`` still has."""
    digest = hashlib.sha256()
    while part := stream.read(_READ):
        digest.update(part)
    return f"{FORMAT}, sha256 of all bytes after 512: {digest.hexdigest()}\n".encode().ljust(_BLOCK)


def package_version(package: str) -> str:
    """Return the version of an installed package."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def table(name: str, rows: Sequence[Sequence[Any]]) -> NDArray[Any]:
    """Return the table ``name`` of ``rows``; their cells are in the order of the fields."""
    kinds = {column: kind for column, (kind, *_) in dictionary()[name].items()}
    columns: list[Any] = list(zip(*rows, strict=True)) or [() for _ in kinds]
    arrays = {
        column: texts(cells) if kind == "text" else np.array(cells, kind)
        for (column, kind), cells in zip(kinds.items(), columns, strict=True)
    }
    return structured(arrays, len(rows))
