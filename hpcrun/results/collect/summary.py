"""Last, lowest and highest value of each metric of a run, and the rows that count."""

from __future__ import annotations

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
