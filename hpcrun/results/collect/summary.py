"""Last, lowest and highest value of each metric of a run, and the rows that count."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcrun.results.collect.columns import ParsedLines

NO_STEP = -1
_NO_METRICS = ("step", "time", "restart")


def counted(columns: dict[str, NDArray[Any]], rows: int) -> NDArray[np.bool_] | None:
    """Return the rows that count, or None if all rows count.

    A restart repeats steps that the previous attempt lost. For a repeated step, only the rows of the later
    attempt count.
    """
    steps = columns.get("step")
    if steps is None or rows < 2 or steps.dtype.kind not in "iuf":
        return None
    before, after = steps[:-1], steps[1:]
    back = after < before
    restart = columns.get("restart")
    if restart is not None and restart.dtype.kind in "iuf":
        known = _without_gaps(restart)
        back |= (after == before) & (known[1:] != known[:-1])
    rewinds = np.flatnonzero(back)
    if not len(rewinds):
        return None
    keep = np.ones(rows, bool)
    for at in rewinds + 1:
        keep[:at] &= steps[:at] < steps[at]
    return keep


def _without_gaps(restart: NDArray[Any]) -> NDArray[Any]:
    """Return the restart of each row; a line without a restart has that of the previous line."""
    rows = np.where(np.isfinite(restart), np.arange(len(restart)), 0)
    filled: NDArray[Any] = np.nan_to_num(restart[np.maximum.accumulate(rows)])
    return filled


def summary_of(lines: ParsedLines) -> list[tuple[Any, ...]]:
    """Return a row of the table ``summary`` for each metric, without the run."""
    names = [
        name
        for name, column in lines.columns.items()
        if name not in _NO_METRICS and column.dtype.kind in "iufb"
    ]
    if not names:
        return []
    keep = counted(lines.columns, lines.rows)
    steps = _steps(lines)
    found = []
    whole = [name for name in names if name not in lines.present]
    if keep is None and whole:
        # All together: ten numpy calls for each column cost more than the columns.
        found += _summaries(whole, np.array([lines.columns[name] for name in whole]), steps)
        names = [name for name in names if name in lines.present]
    for name in names:
        here = lines.present.get(name)
        mask = keep if here is None else here if keep is None else keep & here
        column = lines.columns[name].astype(np.float64)
        if mask is not None:
            column = column[mask]
        chosen = steps if mask is None else steps[mask]
        found += _summaries([name], column[None, :], chosen) if len(column) else []
    return found


def _steps(lines: ParsedLines) -> NDArray[Any]:
    """Return the step of each row, or the number of the row if it has none."""
    steps = lines.columns.get("step")
    if steps is None or steps.dtype.kind not in "iuf":
        return np.arange(lines.rows)
    if steps.dtype.kind == "f":
        return np.where(np.isfinite(steps), steps, NO_STEP).astype(np.int64)
    return steps


def _summaries(
    names: list[str], values: NDArray[Any], steps: NDArray[Any]
) -> list[tuple[Any, ...]]:
    values = values.astype(np.float64, copy=False)
    finite = np.isfinite(values)
    some = finite.any(axis=1)
    all_finite = bool(finite.all())
    lowest = (values if all_finite else np.where(finite, values, np.inf)).argmin(axis=1)
    highest = (values if all_finite else np.where(finite, values, -np.inf)).argmax(axis=1)
    index = np.arange(len(names))
    rows = values.shape[1]
    return list(
        zip(
            names,
            [rows] * len(names),
            (rows - finite.sum(axis=1)).tolist(),
            values[:, -1].tolist(),
            [int(steps[-1])] * len(names),
            np.where(some, values[index, lowest], np.nan).tolist(),
            np.where(some, steps[lowest], NO_STEP).tolist(),
            np.where(some, values[index, highest], np.nan).tolist(),
            np.where(some, steps[highest], NO_STEP).tolist(),
            strict=True,
        )
    )


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
