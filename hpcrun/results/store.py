"""results.h5: a reader, and a writer that replaces the whole file.

The file begins with a user block, which HDF5 does not read: it has the SHA-256 of all other bytes. A reader
checks it before HDF5 sees the file. For other programs, each dataset has a checksum of its own (Fletcher-32).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from threading import Event, Thread
from typing import Any, BinaryIO

import h5py
import numpy as np
from h5py import h5d, h5g, h5o, h5p, h5s, h5t
from numpy.typing import NDArray

from hpcrun.errors import ResultsError
from hpcrun.results.collect.run_reader import RunData
from hpcrun.results.collect.summary import DOCUMENTS, EVENTS, FORMAT, METRICS, VERSION, unit_of
from hpcrun.run.files import sync_directory

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

    def __init__(self, path: Path, *, any_layout: bool = False, check: bool = True) -> None:
        """Open ``path``.

        Args:
            any_layout: also accept the layout of another version, to replace the file.
            check: False: the caller has opened the file before, under the lock of its writer.

        Raises:
            ResultsError: the file is missing, damaged, or not a results file of this version.
        """
        self.path = path
        try:
            with path.open("rb") as stream:
                head = stream.read(_BLOCK)
                intact = not check or head == _user_block(stream)
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
            self._require_results_file(any_layout, intact)
        except BaseException:
            self.file.close()
            raise

    def _damaged(self) -> ResultsError:
        return ResultsError(
            f"{self.path}: is damaged, or another program has changed it (its checksum is wrong); move it "
            "away, and make it again with `hpcrun aggregate`"
        )

    def _require_results_file(self, any_layout: bool, intact: bool) -> None:
        found = self.file.attrs.get("format")
        if found != FORMAT:
            raise ResultsError(
                f"{self.path}: is an HDF5 file, but not one of hpcrun's results; choose another name"
            )
        layout = int(self.file.attrs.get("layout_version", 0))
        if layout != VERSION and not any_layout:
            raise ResultsError(
                f"{self.path}: has layout {layout}, and this version of hpcrun reads layout {VERSION}; "
                "make the file again with `hpcrun aggregate --fresh`"
            )
        if layout == VERSION and not intact:
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
        return self._part(key, METRICS)

    def events(self, key: str) -> NDArray[Any] | None:
        """Return a run's events, or None if the run has none."""
        return self._part(key, EVENTS)

    def _part(self, key: str, name: str) -> NDArray[Any] | None:
        group = self.file["run"][key]
        if name not in group:
            return None
        found: NDArray[Any] = group[name][:]
        return found

    def document(self, key: str, name: str) -> bytes | None:
        """Return the JSON of a run's ``config``, ``identity`` or ``result``, or None.

        Raises:
            KeyError: the file has no such run.
        """
        # The low-level calls take a tenth of the time of h5py's own.
        try:
            group = h5g.open(self.file.id, f"run/{key}".encode())
        except ValueError:
            raise KeyError(key) from None
        if name.encode() not in group:
            return None
        dataset = h5d.open(group, name.encode())
        kind = dataset.get_type()
        raw = np.empty(1, f"S{kind.get_size()}")
        dataset.read(h5s.ALL, h5s.ALL, raw, kind)
        return bytes(raw[0])

    def units(self) -> dict[str, str]:
        """Return the unit of each column that has one."""
        return {str(name): str(unit) for name, unit in self.file["units"].attrs.items()}


class Draft:
    """A new results.h5 under a temporary name, which :meth:`publish` renames.

    The file under the final name is always whole, old or new, also if the process is killed.
    """

    def __init__(self, path: Path, base: Path | None) -> None:
        """Prepare an empty draft, or a copy of ``base``; write nothing yet."""
        self._path, self._base = path, base
        self._copy: FileCopy | None = None
        self._file: Any = None
        self._temporary = path.with_name(f".{path.name}.{os.urandom(6).hex()}.tmp")
        self._types: dict[Any, Any] = {}
        self._units: dict[str, str] = {}

    def begin(self) -> None:
        """Begin to copy the base, in a thread; a second call does nothing."""
        if self._base is not None and self._copy is None:
            self._copy = FileCopy(self._base, self._temporary)

    @property
    def copying(self) -> bool:
        """True if :meth:`open` would wait for the copy."""
        return self._copy is not None and self._copy.running

    def open(self) -> None:
        """Open the draft for writing, after the copy is complete; raises OSError."""
        self.begin()
        if self._copy is not None:
            self._copy.wait()
        mode = "w" if self._copy is None else "r+"
        block = _BLOCK if self._copy is None else None
        self._file = h5py.File(
            self._temporary, mode, libver=_LIBVER, locking=False, userblock_size=block
        )
        if self._copy is None:
            # In the order of the run's names, which is not the order in which they are written.
            self._file.create_group("run")
            self._file.create_group("units")
        self._runs = self._file["run"].id

    def drop(self, key: str) -> None:
        """Remove a run; later runs reuse its space in the file."""
        if key.encode() in self._runs:
            self._runs.unlink(key.encode())

    def put(self, key: str, data: RunData, units: Mapping[str, str]) -> int:
        """Write a run and return the bytes that it takes."""
        group = h5g.create(self._runs, key.encode())
        size = _OVERHEAD
        for name, records in ((METRICS, data.metrics), (EVENTS, data.events)):
            if records is not None:
                self._write(group, name, records)
                size += records.nbytes
        for name in DOCUMENTS:
            raw = data.documents.get(name)
            if raw is not None:
                self._write(group, name, np.array([raw], f"S{-(-len(raw) // 64) * 64}"))
                size += len(raw)
        if data.metrics is not None:
            self._note_units(data.metrics.dtype.names or (), units)
        return size

    def keep_units(self, units: Mapping[str, str]) -> None:
        """Add the units of a file from which runs are copied."""
        self._units |= units

    def copy(self, source: ResultsFile, key: str) -> None:
        """Copy a run from another file unchanged."""
        h5o.copy(source.file["run"].id, key.encode(), self._runs, key.encode())

    def tables(self, tables: Mapping[str, NDArray[Any]]) -> None:
        """Replace the tables of all runs."""
        for name, records in tables.items():
            if name in self._file:
                del self._file[name]
            self._write(self._file.id, name, records)
            self._note_units(records.dtype.names or (), {})
        self._file.attrs.update(
            {
                "format": FORMAT,
                "layout_version": VERSION,
                "hpcrun_version": _version("hpcrun"),
                "h5py_version": h5py.version.version,
                "hdf5_version": h5py.version.hdf5_version,
                "numpy_version": np.__version__,
                "written": time.time(),
            }
        )
        attributes = self._file["units"].attrs
        for name, unit in self._units.items():
            if attributes.get(name) != unit:
                attributes[name] = unit

    def publish(self) -> None:
        """Make the draft durable and give it the final name; raises OSError."""
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
        if self._copy is not None:
            self._copy.stop()
        # A full disk fails the last write of HDF5 as well.
        with contextlib.suppress(OSError, RuntimeError):
            if self._file is not None:
                self._file.close()
        self._temporary.unlink(missing_ok=True)

    def _note_units(self, columns: tuple[str, ...], units: Mapping[str, str]) -> None:
        for column in columns:
            if column not in self._units:
                unit = units.get(column) or unit_of(column)
                if unit is not None:
                    self._units[column] = unit

    def _write(self, group: Any, name: str, records: NDArray[Any]) -> None:
        """Write one dataset. The low-level calls take a quarter of the time of h5py's own."""
        kind = self._types.get(records.dtype)
        if kind is None:
            kind = self._types[records.dtype] = h5t.py_create(_utf8(records.dtype), logical=True)
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


def sweep(path: Path) -> None:
    """Remove the drafts of processes that were killed. Only the holder of the lock may call it."""
    for entry in path.parent.iterdir():
        if entry.name.startswith(f".{path.name}.") and entry.name.endswith(".tmp"):
            entry.unlink(missing_ok=True)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


# Older kernels and some file systems cannot copy a range.
_NOT_BETWEEN_THESE = (errno.ENOSYS, errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.EBADF)
# Bytes that are copied and written to the disk before the next ones.
_PART = 1 << 26
_COPYING_READ = 1 << 22


class FileCopy:
    """The copy of a file. If the file system supports it, the copy shares the blocks, which takes no time.

    The thread also writes the bytes to the disk, so that a later fsync has less to do.
    """

    def __init__(self, source: Path, target: Path) -> None:
        """Begin to copy ``source`` to the new file ``target``."""
        self._source, self._target = source, target
        self._stop = Event()
        self._error: BaseException | None = None
        self._thread = Thread(target=self._run, name=f"copy of {source.name}", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        """True while the copy is incomplete."""
        return self._thread.is_alive()

    def wait(self) -> None:
        """Wait until the copy is complete; raises OSError if the disk refused."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Stop the copy, incomplete or not, and wait for the end of the thread."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._copy()
        except BaseException as error:
            self._error = error

    def _copy(self) -> None:
        with self._source.open("rb") as old, self._target.open("wb") as new:
            left = os.fstat(old.fileno()).st_size
            try:
                while left and not self._stop.is_set():
                    done = os.copy_file_range(old.fileno(), new.fileno(), min(left, _PART))
                    if not done:
                        break
                    left -= done
                    os.fdatasync(new.fileno())
            except OSError as error:
                if error.errno not in _NOT_BETWEEN_THESE:
                    raise
            # A file system may report the end too early.
            while not self._stop.is_set() and (block := old.read(_COPYING_READ)):
                new.write(block)
