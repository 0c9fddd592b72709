"""results.h5: its tables, a reader, and a writer that replaces the whole file.

The file begins with a user block, which HDF5 does not read: it has the SHA-256 of all other bytes. A reader
checks it before HDF5 sees the file. For other programs, each dataset has a checksum of its own (Fletcher-32).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import h5py
import numpy as np
from h5py import h5d, h5g, h5o, h5p, h5s, h5t
from numpy.typing import NDArray

from hpcrun.errors import ResultsError
from hpcrun.results.collect.columns import flat, structured
from hpcrun.run.files import sync_directory

if TYPE_CHECKING:
    from hpcrun.results.collect.run_reader import RunData

FORMAT = "hpcrun results"
VERSION = 2
TABLES = ("runs", "summary", "files", "problems")
# A width of None: as wide as the longest text.
_TABLE_FIELDS: dict[str, tuple[tuple[str, str | None], ...]] = {
    "runs": (
        *(("run", None), ("name", None), ("path", None), ("state", None), ("cause", None)),
        *(("reason", None), ("executor", None), ("created", "f8"), ("ended", "f8")),
        *(("attempts", "i8"), ("step", "i8"), ("rows", "i8"), ("seed", "i8")),
        *(("problems", "i8"), ("bytes", "i8")),
    ),
    "summary": (
        *(("run", None), ("metric", None), ("rows", "i8"), ("nonfinite", "i8")),
        *(("last", "f8"), ("last_step", "i8"), ("min", "f8"), ("min_step", "i8")),
        *(("max", "f8"), ("max_step", "i8")),
    ),
    "files": (
        *(("run", None), ("file", None), ("size", "i8"), ("mtime_ns", "i8"), ("inode", "u8")),
    ),
    "problems": (("run", None), ("file", None), ("problem", None)),
}
_LONGEST = 2000
_UNITS = {
    **dict.fromkeys(("time", "created", "ended", "step_time", "data_wait", "stop_wait"), "s"),
    **dict.fromkeys(("slowest_own_time", "fastest_own_time"), "s"),
    **dict.fromkeys(("memory_gb", "gpu_memory_gb"), "GB"),
    **dict.fromkeys(("bytes", "size"), "B"),
    **{"gpu_utilization": "%", "mtime_ns": "ns", "step": "step"},
}
# h5dump 1.10 and later read it.
_LIBVER = ("v110", "v110")
# The smallest user block of HDF5.
_BLOCK = 512
_READ = 1 << 20
# HDF5 limits a chunk to 4 GiB.
_MOST_IN_CHUNK = 1 << 28
# A group, its links and the heads of its datasets.
_OVERHEAD = 4000


class ResultsFile:
    """A results.h5 opened for reading. The file is never changed in place, so it needs no lock."""

    def __init__(self, path: Path) -> None:
        """Open ``path``.

        Raises:
            ResultsError: the file is missing, damaged, or not a results file of this version.
        """
        self.path = path
        try:
            with path.open("rb") as stream:
                head = stream.read(_BLOCK)
                intact = head == _user_block(stream)
            if head.startswith(FORMAT.encode()) and not intact:
                raise self._damaged()
            self.file: Any = h5py.File(path, "r", locking=False)
        except FileNotFoundError:
            raise ResultsError(
                f"{path}: no such file; `hpcrun aggregate RUNS -o {path}` makes it"
            ) from None
        except OSError as error:
            reason = " ".join(str(error).split())
            raise ResultsError(
                f"{path}: is not an HDF5 file, or is damaged ({reason}); move it away, or choose "
                "another name"
            ) from None
        try:
            self._require_results_file(intact)
        except BaseException:
            self.file.close()
            raise

    def _damaged(self) -> ResultsError:
        return ResultsError(
            f"{self.path}: is damaged, or another program has changed it (its checksum is wrong); move it "
            "away, and make it again with `hpcrun aggregate`"
        )

    def _require_results_file(self, intact: bool) -> None:
        found = self.file.attrs.get("format")
        if found != FORMAT:
            raise ResultsError(
                f"{self.path}: is an HDF5 file, but not one of hpcrun's results; choose another name"
            )
        layout = int(self.file.attrs.get("layout_version", 0))
        if layout != VERSION:
            raise ResultsError(
                f"{self.path}: has layout {layout}, and this version of hpcrun reads layout {VERSION}; "
                "move the file away, and make it again with `hpcrun aggregate`"
            )
        if not intact:
            raise self._damaged()

    def __enter__(self) -> ResultsFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def table(self, name: str) -> NDArray[Any]:
        """Return a whole table; its texts are UTF-8 bytes."""
        found: NDArray[Any] = self.file[name][:]
        return found

    def keys(self) -> list[str]:
        """Return the keys of all runs, in the order of the table ``runs``."""
        return [key.decode() for key in self.table("runs")["run"].tolist()]

    def metrics(self, key: str) -> NDArray[Any] | None:
        """Return a run's metrics, or None if the run has none."""
        return self._part(key, "metrics")

    def events(self, key: str) -> NDArray[Any] | None:
        """Return a run's events, or None if the run has none."""
        return self._part(key, "events")

    def _part(self, key: str, name: str) -> NDArray[Any] | None:
        path = f"run/{key}/{name}"
        found: NDArray[Any] | None = self.file[path][:] if path in self.file else None
        return found

    def document(self, key: str, name: str) -> dict[str, Any]:
        """Return a run's ``config``, ``identity`` or ``result``; empty if the run has none.

        Raises:
            KeyError: the file has no such run.
        """
        group = self.file["run"][key]
        value = json.loads(group[name][0]) if name in group else {}
        return value if isinstance(value, dict) else {}

    def config(self, key: str) -> dict[str, Any]:
        """Return the config of a run with dotted keys.

        A run of a sweep of a command also has the values of the placeholders, and its command has the
        placeholders: the runs of the sweep have one command.
        """
        values = flat(self.document(key, "config"))
        swept = self.document(key, "identity").get("sweep") if values.get("command") else None
        if not isinstance(swept, dict) or not isinstance(swept.get("values"), dict):
            return values
        own = {name: value for name, value in swept["values"].items() if name not in values}
        return values | own | {"command": swept.get("command", values["command"])}

    def units(self) -> dict[str, str]:
        """Return the unit of each column that has one."""
        return {str(name): str(unit) for name, unit in self.file["units"].attrs.items()}


class Draft:
    """A new results.h5 under a temporary name, which :meth:`publish` renames.

    The file under the final name is always whole, old or new, also if the process is killed.
    """

    def __init__(self, path: Path, units: Mapping[str, str]) -> None:
        """Make an empty draft of ``path``; ``units`` are those of the columns that hpcrun does not know."""
        self._path, self._known = path, units
        self._temporary = path.with_name(f".{path.name}.{os.urandom(6).hex()}.tmp")
        self._types: dict[Any, Any] = {}
        self._units: dict[str, str] = {}
        self._file = h5py.File(
            self._temporary, "w", libver=_LIBVER, locking=False, userblock_size=_BLOCK
        )
        # In the order of the run's names, which is not the order in which they are written.
        self._runs = self._file.create_group("run").id

    def put(self, key: str, data: RunData) -> int:
        """Write a run and return the bytes that it takes; raises ValueError if HDF5 refuses a name."""
        group = h5g.create(self._runs, key.encode())
        size = _OVERHEAD
        for name, records in (("metrics", data.metrics), ("events", data.events)):
            if records is not None:
                self._write(group, name, records)
                size += records.nbytes
        for name, raw in data.documents.items():
            self._write(group, name, np.array([raw], f"S{-(-len(raw) // 64) * 64}"))
            size += len(raw)
        return size

    def drop(self, key: str) -> None:
        """Remove a run that was written in part."""
        self._runs.unlink(key.encode())

    def copy(self, source: ResultsFile, keys: Iterable[str]) -> None:
        """Copy runs from another file unchanged, with the units of its columns."""
        self._units |= source.units()
        for key in keys:
            h5o.copy(source.file["run"].id, key.encode(), self._runs, key.encode())

    def publish(self, tables: Mapping[str, NDArray[Any]]) -> None:
        """Write the tables of all runs, make the file durable and rename it; raises OSError."""
        for name, records in tables.items():
            self._write(self._file.id, name, records)
        self._file.create_group("units").attrs.update(self._units)
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
        with self._temporary.open("r+b") as stream:
            stream.seek(_BLOCK)
            block = _user_block(stream)
            stream.seek(0)
            stream.write(block)
            stream.flush()
            os.fsync(stream.fileno())
        self._temporary.replace(self._path)
        sync_directory(self._path.parent)

    def discard(self) -> None:
        """Remove the draft."""
        # A full disk fails the last write of HDF5 as well.
        with contextlib.suppress(OSError, RuntimeError):
            self._file.close()
        self._temporary.unlink(missing_ok=True)

    def _write(self, group: Any, name: str, records: NDArray[Any]) -> None:
        """Write one dataset. The low-level calls take a quarter of the time of h5py's own."""
        kind = self._types.get(records.dtype)
        if kind is None:
            kind = self._types[records.dtype] = h5t.py_create(_utf8(records.dtype), logical=True)
            for column in records.dtype.names or ():
                unit = self._known.get(column) or _unit_of(column)
                if unit is not None:
                    self._units[column] = unit
        plist = h5p.create(h5p.DATASET_CREATE)
        if records.size:
            plist.set_fill_time(h5d.FILL_TIME_NEVER)
            plist.set_chunk((min(records.size, max(1, _MOST_IN_CHUNK // records.itemsize)),))
            plist.set_fletcher32()
        dataset = h5d.create(group, name.encode(), kind, h5s.create_simple(records.shape), plist)
        if records.size:
            dataset.write(h5s.ALL, h5s.ALL, records, kind)


def _user_block(stream: BinaryIO) -> bytes:
    """Return the user block for the bytes that ``stream`` still has."""
    digest = hashlib.sha256()
    while part := stream.read(_READ):
        digest.update(part)
    return f"{FORMAT}, sha256 of all bytes after 512: {digest.hexdigest()}\n".encode().ljust(_BLOCK)


def _utf8(kind: np.dtype[Any]) -> np.dtype[Any]:
    """Return the type with its texts marked as UTF-8."""
    if kind.names is None:
        return h5py.string_dtype("utf-8", kind.itemsize) if kind.kind == "S" else kind
    return np.dtype([(name, _utf8(kind[name])) for name in kind.names])


def remove_drafts(path: Path) -> None:
    """Remove the drafts of processes that were killed. Only the holder of the lock may call it."""
    for entry in path.parent.iterdir():
        if entry.name.startswith(f".{path.name}.") and entry.name.endswith(".tmp"):
            entry.unlink(missing_ok=True)


def package_version(package: str) -> str:
    """Return the version of an installed package."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def _unit_of(column: str) -> str | None:
    return "1/s" if column.endswith("_per_second") else _UNITS.get(column)


def table(name: str, rows: Sequence[Sequence[Any]]) -> NDArray[Any]:
    """Return the table ``name`` of ``rows``; their cells are in the order of the fields."""
    columns: list[Any] = list(zip(*rows, strict=True)) or [() for _ in _TABLE_FIELDS[name]]
    arrays = {
        field: texts(column) if kind is None else np.array(column, kind)
        for (field, kind), column in zip(_TABLE_FIELDS[name], columns, strict=True)
    }
    return structured(arrays, len(rows))


def texts(values: Iterable[str | None]) -> NDArray[Any]:
    """Return UTF-8 texts of one width, cut if they are long; other bytes are escaped, None is empty."""
    whole = [(value or "").encode(errors="backslashreplace") for value in values]
    raw = [text[:_LONGEST].decode(errors="ignore").encode() for text in whole]
    return np.array(raw, f"S{max(map(len, raw), default=1) or 1}")
