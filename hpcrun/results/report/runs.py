"""The runs of a results file, with what the figures and tables need of each."""

from __future__ import annotations

import json
import math
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcrun.errors import UserError
from hpcrun.results.collect.aggregate import RunSource, aggregate
from hpcrun.results.collect.columns import counted, fields
from hpcrun.results.collect.run_reader import find_runs
from hpcrun.results.groups import labels, with_options
from hpcrun.results.store import ResultsFile
from hpcrun.run.goodput import Goodput, goodput
from hpcrun.run.journal.events import to_events
from hpcrun.run.journal.state import State


@dataclass(frozen=True)
class ReportedRun:
    """One run of a results file.

    Args:
        key: unique name in the file.
        label: unique name for people.
        path: real path of the run directory, which may be gone.
        ended: Unix seconds of the end; None for a run without a result.
        seen: Unix seconds of the last sign of life.
        config: the config, with dotted keys; options of a command as ``--name``.
        columns: the numbers of the rows of metrics that count, by name.
    """

    key: str
    label: str
    path: str
    state: str
    cause: str
    reason: str
    executor: str
    created: float | None
    ended: float | None
    seen: float | None
    seed: Any
    step: int | None
    attempts: int
    config: Mapping[str, Any]
    identity: Mapping[str, Any]
    journal: State
    columns: Mapping[str, NDArray[Any]] = field(repr=False)

    @cached_property
    def goodput(self) -> Goodput:
        """The parts of the time from the first event to the end, or to the last sign of life."""
        return goodput(self.journal, self.ended or self.seen or 0.0)

    def series(self, metric: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the steps and the finite values of ``metric``, in the order of the steps.

        If the step is missing or a text, the number of the row replaces it, as in the summary.
        """
        column = self.columns.get(metric)
        if column is None:
            return np.empty(0), np.empty(0)
        xs = self.columns.get("step", np.arange(len(column))).astype(np.float64)
        ys = column.astype(np.float64)
        good = np.isfinite(xs) & np.isfinite(ys)
        order = np.argsort(xs[good], kind="stable")
        return xs[good][order], ys[good][order]

    @property
    def throughput(self) -> str | None:
        """The name of the metric that counts samples, tokens or images in a second."""
        names = sorted(name for name in self.columns if name.endswith("_per_second"))
        return names[0] if names else None


def iterate_runs(store: ResultsFile) -> Iterator[ReportedRun]:
    """Yield all runs of ``store`` in the order of their names."""
    known = labels(store)
    return (_run(store, row, known[row["run"].decode()]) for row in store.table("runs"))


def _run(store: ResultsFile, row: Any, label: str) -> ReportedRun:
    key = row["run"].decode()
    columns = _columns(store, key)
    journal = _journal(store, key)
    config = with_options(store.config(key))
    return ReportedRun(
        key=key,
        label=label,
        path=row["path"].decode(),
        state=row["state"].decode(),
        cause=row["cause"].decode(),
        reason=row["reason"].decode(),
        executor=row["executor"].decode(),
        created=_known(row["created"]),
        ended=_known(row["ended"]),
        seen=_last_sign(journal, columns, _known(row["ended"])),
        seed=config.get("seed"),
        step=int(row["step"]) if row["step"] >= 0 else None,
        attempts=int(row["attempts"]),
        config=config,
        identity=store.document(key, "identity"),
        journal=journal,
        columns=columns,
    )


def _columns(store: ResultsFile, key: str) -> dict[str, NDArray[Any]]:
    records = store.metrics(key)
    if records is None:
        return {}
    whole = fields(records)
    keep = counted(whole, len(records))
    return {
        name: np.ascontiguousarray(column if keep is None else column[keep])
        for name, column in whole.items()
        if column.dtype.kind in "iufb"
    }


def _journal(store: ResultsFile, key: str) -> State:
    records = store.part(key, "events")
    return State([] if records is None else to_events(map(_line, records)))


def _line(row: Any) -> dict[str, Any]:
    """Return the line of the journal that a row of the table ``events`` was made from."""
    job = row["job"].decode()
    return {
        **json.loads(row["fields"].decode() or "{}"),
        "event": row["event"].decode(),
        "time": float(row["time"]),
        **({"job": job, "restart": int(row["restart"])} if job else {}),
        "cause": row["cause"].decode() or None,
        "step": int(row["step"]) if row["step"] >= 0 else None,
    }


def _known(value: Any) -> float | None:
    return float(value) if math.isfinite(value) else None


def _last_sign(
    journal: State, columns: Mapping[str, NDArray[Any]], ended: float | None
) -> float | None:
    times = [event.time for event in journal.events]
    logged = columns.get("time")
    if logged is not None and np.isfinite(logged).any():
        times.append(float(np.nanmax(logged)))
    if ended is not None:
        times.append(ended)
    return max(times, default=None)


def counts(runs: Sequence[ReportedRun]) -> Mapping[str, int]:
    """Return the number of runs in each state, in a fixed order."""
    found = Counter(run.state for run in runs)
    order = ("finished", "cancelled", "pruned", "stopped", "failed", "unfinished", "new")
    return {state: found[state] for state in order if found[state]}


@contextmanager
def open_results(
    named: Sequence[str], runs_dir: Path, kept: Path | None = None
) -> Iterator[ResultsFile]:
    """Yield the results of ``named``: one results file, or run directories and folders of them.

    Directories are first collected into a temporary results file, so that both sources give the same figures.

    Args:
        kept: a folder for the temporary file, which stays: the next call reads only changed runs.

    Raises:
        UserError: a results file is named together with another source.
        ResultsError: a source holds no runs.
    """
    files = [name for name in named if Path(name).is_file() or name.endswith((".h5", ".hdf5"))]
    if files and len(named) > 1:
        raise UserError(
            f"{files[0]}: is a results file, and takes no other source; collect all runs into one file "
            "with `hpcrun aggregate`"
        )
    if files:
        with ResultsFile(Path(files[0])) as store:
            yield store
        return
    found = RunSource(find_runs(named or [str(runs_dir)], runs_dir))
    with ExitStack() as stack:
        folder = kept or Path(stack.enter_context(temporary_folder()))
        path = folder / "results.h5"
        aggregate(found, path, processes=0)
        yield stack.enter_context(ResultsFile(path))


def temporary_folder() -> tempfile.TemporaryDirectory[str]:
    """Return a folder for collected runs, which is removed at the end of its ``with``."""
    return tempfile.TemporaryDirectory(prefix="hpcrun-report-")
