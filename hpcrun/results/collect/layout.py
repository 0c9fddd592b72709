"""The layout of results.h5, which docs/results.md describes."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

FORMAT = "hpcrun results"
VERSION = 2

METRICS, EVENTS = "metrics", "events"
DOCUMENTS = ("config", "identity", "result")
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
    "time": "s",
    "created": "s",
    "ended": "s",
    "step_time": "s",
    "data_wait": "s",
    "slowest_own_time": "s",
    "fastest_own_time": "s",
    "memory_gb": "GB",
    "gpu_utilization": "%",
    "gpu_memory_gb": "GB",
    "bytes": "B",
    "size": "B",
    "mtime_ns": "ns",
    "step": "step",
}


def unit_of(column: str) -> str | None:
    """Return the unit of a column that hpcrun writes, or None."""
    return "1/s" if column.endswith("_per_second") else _UNITS.get(column)


def table(name: str, rows: Sequence[Sequence[Any]]) -> NDArray[Any]:
    """Return the table ``name`` of ``rows``; their cells are in the order of the fields."""
    fields = _TABLE_FIELDS[name]
    columns: list[Any] = list(zip(*rows, strict=True)) or [() for _ in fields]
    arrays = [
        texts(column) if kind is None else np.array(column, kind)
        for (_, kind), column in zip(fields, columns, strict=True)
    ]
    return structured(dict(zip((field for field, _ in fields), arrays, strict=True)), len(rows))


def structured(columns: dict[str, NDArray[Any]], rows: int) -> NDArray[Any]:
    """Return ``columns`` as one array of records."""
    whole = np.empty(rows, np.dtype([(name, column.dtype) for name, column in columns.items()]))
    for name, column in columns.items():
        whole[name] = column
    return whole


def texts(values: Iterable[str | None]) -> NDArray[Any]:
    """Return UTF-8 texts of one width; None is empty."""
    raw = [encoded(value) for value in values]
    return np.array(raw, f"S{max(map(len, raw), default=1) or 1}")


def encoded(text: str | None) -> bytes:
    """Return a text of a table as UTF-8; bytes that are not UTF-8 are escaped, long texts are cut."""
    raw = (text or "").encode(errors="backslashreplace")
    return raw if len(raw) <= _LONGEST else raw[:_LONGEST].decode(errors="ignore").encode()
