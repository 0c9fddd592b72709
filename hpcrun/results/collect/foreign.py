"""Files of other programs as columns: CSV, JSON, HDF5, NPZ, TensorBoard and Weights & Biases."""

from __future__ import annotations

import codecs
import io
import json
import struct
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from hpcrun.config.reader import read_yaml
from hpcrun.errors import ResultsError
from hpcrun.results.collect.column_types import misfit_problems
from hpcrun.results.collect.columns import (
    MOST_COLUMNS,
    ParsedLines,
    columns_of,
    flat,
    joined_lines,
    parse_lines,
)
from hpcrun.results.collect.run_reader import line_problems, named_misfits
from hpcrun.results.collect.tables import LARGEST, FileContent, read_csv
from hpcrun.run.files import open_regular, read_at_most

TENSORBOARD = "tfevents"
# Bytes of a file with parameters.
_LARGEST_PARAMETERS = 1 << 24
_HDF5 = (".h5", ".hdf5", ".nc")
# W&B stores records as LevelDB's log does, after a head of 7 bytes: blocks of 32 KiB, and in them fragments
# with CRC, length and kind (1: whole, 2: first, 3: middle, 4: last).
_WANDB_BLOCK, _WANDB_HEAD = 1 << 15, 7


def is_array_file(path: Path) -> bool:
    """Return True for HDF5 and NPZ files, whose rows are data, not a log that restarts."""
    return path.suffix in (*_HDF5, ".npz") or (path.is_file() and h5py.is_hdf5(path))


def read_metrics(path: Path, datasets: Mapping[str, str], axis: int) -> FileContent:
    """Return the columns of a file of metrics.

    Args:
        datasets: of an HDF5 or NPZ file, the dataset (``group/data``) or attribute (``group/data@name``)
            of each column; empty: all datasets.
        axis: the axis of the rows in these datasets.

    Raises:
        OSError: the file cannot be read.
        ResultsError: hpcrun does not read the format, or its library is not installed.
        ValueError: the file is damaged, or has no such dataset.
    """
    # HDF5's library waits for the writer of a FIFO.
    open_regular(path).close()
    if TENSORBOARD in path.name:
        return FileContent(columns_of(_tensorboard_rows(path)))
    if path.suffix == ".wandb":
        return _wandb(path)
    if path.suffix in (".csv", ".tsv"):
        return read_csv(path)
    if path.suffix in _HDF5 or h5py.is_hdf5(path):
        with h5py.File(path, locking=False) as file:
            return _arrays(_items(file, h5py.Dataset), file, datasets, axis)
    if path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
            return _arrays(arrays, arrays, datasets, axis)
    raw = read_at_most(path, LARGEST).removeprefix(codecs.BOM_UTF8)
    if not raw.strip():
        return FileContent(problems=["is empty"])
    if path.suffix == ".json":
        lines = _json(json.loads(raw))
        return FileContent(lines, misfit_problems(lines.misfits, {}, "row"))
    if path.suffix != ".jsonl" and raw.strip() and not raw.lstrip().startswith(b"{"):
        raise ResultsError(
            f"{path}: has a format that hpcrun does not read; `metrics` takes .csv, .tsv, .json, .jsonl, "
            ".h5, .npz, .wandb and TensorBoard files"
        )
    rows, damaged, torn = parse_lines(raw)
    lines = columns_of(rows)
    odd = named_misfits(lines, io.BytesIO(raw))
    return FileContent(lines, line_problems(damaged, torn) + odd)


def read_parameters(path: Path) -> dict[str, Any]:
    """Return the keys and values of a YAML or JSON file, of a W&B run, or of the attributes of an HDF5 file.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file has no keys and values.
    """
    open_regular(path).close()
    if path.suffix == ".wandb":
        return _wandb(path).config
    if path.suffix in _HDF5 or h5py.is_hdf5(path):
        with h5py.File(path, locking=False) as file:
            groups = {"": file} | _items(file, h5py.Group)
            return {
                f"{name.replace('/', '.')}.{key}".lstrip("."): value
                for name, group in groups.items()
                for key, value in _attributes(group).items()
            }
    raw = read_at_most(path, _LARGEST_PARAMETERS).decode()
    value = (
        json.loads(raw)
        if path.suffix == ".json"
        else read_yaml(raw, lambda line: f"line {line}")[0]
    )
    if not isinstance(value, dict):
        raise ValueError("should be keys and values")
    return value


def _items(file: h5py.File, kind: type) -> dict[str, Any]:
    """Return all datasets, or all groups, of a file by their path."""
    found: dict[str, Any] = {}
    file.visititems(lambda name, item: found.update({name: item} if isinstance(item, kind) else {}))
    return found


def _attributes(item: Any) -> dict[str, Any]:
    return {name: _plain(value) for name, value in item.attrs.items()}


def _plain(value: Any) -> Any:
    """Return an attribute as Python's numbers, texts and lists."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    return value.decode(errors="backslashreplace") if isinstance(value, bytes) else value


def _arrays(
    found: Mapping[str, Any], file: Any, wanted: Mapping[str, str], axis: int
) -> FileContent:
    """Return the columns of the datasets ``found`` in ``file``."""
    content = FileContent()
    columns: dict[str, Any] = {}
    constants: dict[str, Any] = {}
    rows: dict[int, str] = {}
    for name, place in (wanted or {name: name for name in found if found[name].ndim}).items():
        path, _, attribute = place.partition("@")
        path = path.strip("/")
        try:
            item = file[path or "/"]
            value = item.attrs[attribute] if attribute else None if item.ndim else item[()]
        except (KeyError, AttributeError):
            has = ", ".join(sorted(found)) or "nothing"
            raise ValueError(f"has no {place}, which `datasets` names; it has {has}") from None
        if value is not None:
            constants[name] = _plain(value)
            content.described[name] = ("", "", place)
            continue
        notes = _attributes(item) if isinstance(item, h5py.Dataset) else {}
        unit = str(notes.get("units", notes.get("unit", "")))
        meaning = str(notes.get("long_name", notes.get("description", "")))
        for column, values in _split(name, _rows_first(place, item, axis)):
            columns[column], rows[len(values)] = _values(place, values), place
            content.described[column] = (unit, meaning, place)
    if len(rows) > 1:
        shown = ", ".join(f"{place} has {count:,}" for count, place in rows.items())
        raise ValueError(
            f"has datasets of different lengths along axis {axis} ({shown}); choose some with `datasets`, or "
            "change `axis`"
        )
    count = next(iter(rows), 0)
    columns |= {name: [value] * count for name, value in constants.items()}
    content.lines = joined_lines([ParsedLines(columns, rows=count)])
    return content


def _rows_first(place: str, item: Any, axis: int) -> NDArray[Any]:
    """Return a dataset with its rows along the first axis."""
    if not -item.ndim <= axis < item.ndim:
        raise ValueError(f"{place} has {item.ndim} dimensions, and `axis` is {axis}")
    wide = item.size // max(item.shape[axis], 1)
    if wide > MOST_COLUMNS:
        raise ValueError(
            f"{place} has {wide:,} values for each row, and a run {MOST_COLUMNS} columns; choose other "
            "datasets with `datasets`, and merge this one with h5py"
        )
    # HDF5 reads a virtual dataset without its files as zeros.
    for source in item.virtual_sources() if getattr(item, "is_virtual", False) else ():
        if not Path(item.file.filename).parent.joinpath(source.file_name).exists():
            raise ValueError(f"{place} needs {source.file_name}, which is missing")
    is_text = isinstance(item, h5py.Dataset) and h5py.check_string_dtype(item.dtype)
    return np.moveaxis(np.asarray(item.asstr()[()], str) if is_text else item[()], axis, 0)


def _split(name: str, values: NDArray[Any]) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield a column for each value that a row has, such as ``position.0`` and ``field.imag``."""
    if values.ndim > 1:
        parts = {str(at): values[:, at] for at in range(values.shape[1])}
    elif values.dtype.names:
        parts = {key: values[key] for key in values.dtype.names}
    elif values.dtype.kind == "c":
        parts = {"real": values.real, "imag": values.imag}
    else:
        yield name, values
        return
    for key, part in parts.items():
        yield from _split(f"{name}.{key}", part)


def _values(place: str, values: NDArray[Any]) -> Any:
    """Return values of the types in results.h5: int64, float64, booleans or texts."""
    kind = values.dtype.kind
    if kind in "iu" and (kind == "i" or not values.size or values.max() < 1 << 63):
        return values.astype(np.int64)
    if kind == "f" and values.dtype.itemsize <= 8:
        return values.astype(np.float64)
    if kind == "b":
        return values
    if kind in "SU":
        return [_plain(value) for value in values.tolist()]
    raise ValueError(f"has {place} of type {values.dtype}, which results.h5 cannot hold")


def _json(value: Any) -> ParsedLines:
    """Return the rows of a list of objects, or of an object of equally long lists."""
    if isinstance(value, list) and all(isinstance(row, dict) for row in value):
        return columns_of(value)
    if isinstance(value, dict):
        value = flat(value)
        columns = {key: cells for key, cells in value.items() if isinstance(cells, list)}
        if not columns:
            return columns_of([value])
        others = sorted(value.keys() - columns.keys())
        if len(lengths := set(map(len, columns.values()))) == 1:
            found = joined_lines([ParsedLines(columns, rows=lengths.pop())])
            found.cut += [f"{key} is no list, and is not read" for key in others]
            return found
    raise ValueError("should be a list of objects, or an object of equally long lists")


def _tensorboard_rows(path: Path) -> list[dict[str, Any]]:
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        from tensorboard.util import tensor_util
    except ImportError as error:
        raise ResultsError(
            f"{path}: TensorBoard files need tensorboard: `pip install tensorboard`"
        ) from error
    events = EventAccumulator(str(path), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    tags = events.Tags()
    found = [(tag, event, event.value) for tag in tags["scalars"] for event in events.Scalars(tag)]
    for tag in tags["tensors"]:
        for event in events.Tensors(tag):
            value = tensor_util.make_ndarray(event.tensor_proto)
            if value.size == 1 and np.issubdtype(value.dtype, np.number):
                found.append((tag, event, value.item()))
    rows: dict[int, dict[str, Any]] = {}
    for tag, event, value in found:
        row = rows.setdefault(event.step, {"step": event.step, "time": event.wall_time})
        row[tag] = value
    return [rows[step] for step in sorted(rows)]


def _wandb(path: Path) -> FileContent:
    """Return history and config of a W&B run, also of an offline or unfinished run."""
    try:
        from wandb.proto.wandb_internal_pb2 import Record
    except ImportError as error:
        raise ResultsError(f"{path}: W&B files need wandb: `pip install wandb`") from error
    rows: list[dict[str, Any]] = []
    config: dict[str, Any] = {}
    records, rest = _wandb_records(read_at_most(path, LARGEST))
    for record in records:
        parsed = Record.FromString(record)
        for item in (*parsed.run.config.update, *parsed.config.update):
            config[".".join(item.nested_key) or item.key] = json.loads(item.value_json)
        if parsed.WhichOneof("record_type") == "history":
            row = {
                ".".join(item.nested_key) or item.key: json.loads(item.value_json)
                for item in parsed.history.item
            }
            names = (("_step", "step"), ("_timestamp", "time"))
            rows.append({new: row.pop(old) for old, new in names if old in row} | row)
    config.pop("_wandb", None)
    problems = [f"{rest} bytes at the end are no whole record"] if rest else []
    lines = columns_of(rows)
    problems += misfit_problems(lines.misfits, {}, "row")
    return FileContent(lines, problems, config=config)


def _wandb_records(raw: bytes) -> tuple[list[bytes], int]:
    """Return the whole records of a W&B file, and the number of bytes after the last."""
    if raw and not raw.startswith(b":W&B"):
        raise ValueError("is no W&B file")
    records, begun, at, end = [], b"", _WANDB_HEAD, _WANDB_HEAD
    while at + _WANDB_HEAD <= len(raw):
        left = _WANDB_BLOCK - at % _WANDB_BLOCK
        if left < _WANDB_HEAD:
            at += left
            continue
        crc, size, kind = struct.unpack_from("<IHB", raw, at)
        at += _WANDB_HEAD + size
        if zlib.crc32(raw[at - size - 1 : at]) != crc or at > len(raw):
            break
        begun = (b"" if kind in (1, 2) else begun) + raw[at - size : at]
        if kind in (1, 4):
            records.append(begun)
            end = at
    return records, max(len(raw) - end, 0)
