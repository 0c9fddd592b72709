"""Runs of other programs, described by a small YAML file."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import chain, compress
from pathlib import Path
from typing import Any, Literal

import h5py
import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hpcrun.config import ConfigError
from hpcrun.config.reader import read_yaml
from hpcrun.errors import ResultsError
from hpcrun.results.collect.aggregate import RunSource
from hpcrun.results.collect.columns import (
    columns_of,
    counted,
    flat,
    parse_lines,
    structured,
    summary_of,
)
from hpcrun.results.collect.run_reader import (
    STATES,
    RunData,
    facts_of,
    line_problems,
    signature,
)

_TENSORBOARD = "tfevents"
_RANKS = (
    "goes back to a step of an earlier file, which hides rows as after a restart; add `rows: samples` to the "
    "mapping for files of several ranks, or `rows: log` for restarts"
)

Row = dict[str, Any]


class RunMapping(BaseModel):
    """The places of a run's files below its directory, and the meaning of their columns."""

    model_config = ConfigDict(extra="forbid")

    runs: str = Field(default="*", description="Glob of the run directories.")
    metrics: list[str] = Field(description="Globs: CSV, JSON, JSONL, HDF5 or TensorBoard files.")
    rows: Literal["log", "samples"] | None = Field(
        default=None,
        description="`log`: a step that goes back is a restart. `samples`: rows in any order and file.",
    )
    config: str | None = Field(default=None, description="YAML or JSON file.")
    result: str | None = Field(default=None, description="JSON file.")
    step: str | None = Field(default=None, description="The column of the step.")
    time: str | None = Field(default=None, description="The column of the Unix time.")
    rename: dict[str, str] = Field(default={}, description="New names of columns.")
    units: dict[str, str] = Field(default={}, description="Units of columns.")
    seed: str = Field(default="seed", description="The config's key of the seed.")
    state: Literal["finished", "unfinished"] | None = Field(
        default=None,
        description="State of all runs. Default: finished if there is a result file or none is named.",
    )

    @property
    def names(self) -> dict[str, str]:
        """The new name of each column that gets one."""
        own = {self.step: "step", self.time: "time"}
        return {**self.rename, **{key: name for key, name in own.items() if key is not None}}


def read_mapping(path: Path) -> RunMapping:
    """Return the mapping in ``path``.

    Raises:
        ResultsError: the file is missing or is not a mapping.
    """
    try:
        text = path.read_text()
        value, _ = read_yaml(text, lambda line: f"{path}:{line}")
        if not isinstance(value, dict):
            raise ResultsError(
                f"{path}: should be keys and values, such as `metrics: progress.csv`"
            )
        if isinstance(value.get("metrics"), str):
            value["metrics"] = [value["metrics"]]
        mapping = RunMapping.model_validate(value)
    except (OSError, UnicodeDecodeError) as error:
        raise ResultsError(f"{path}: cannot be read: {error}") from None
    except ConfigError as error:
        raise ResultsError(" ".join(str(error).split())) from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        known = ", ".join(RunMapping.model_fields)
        raise ResultsError(
            f"{path}: {where}: {first['msg'].lower()}; the keys are {known}"
        ) from None
    for pattern in (mapping.runs, *mapping.metrics, mapping.config or "", mapping.result or ""):
        if Path(pattern).is_absolute() or ".." in Path(pattern).parts:
            raise ResultsError(f"{path}: {pattern}: should be a path below the run's directory")
    return mapping


def mapped_source(mapping: RunMapping, folders: Iterable[str]) -> RunSource:
    """Return the runs below ``folders`` that have a file of metrics.

    Raises:
        ResultsError: a folder has none.
    """
    found: dict[str, None] = {}
    for folder in folders:
        if not Path(folder).is_dir():
            raise ResultsError(f"{folder}: no such directory; name a folder of runs")
        here = [
            os.path.realpath(path)
            for path in Path(folder).glob(mapping.runs)
            if path.is_dir() and _matches(path, mapping.metrics)
        ]
        if not here:
            raise ResultsError(
                f"{folder}: no directory {mapping.runs} has a file {' or '.join(mapping.metrics)}; "
                "change `runs` or `metrics` in the mapping"
            )
        found |= dict.fromkeys(here)
    return RunSource(
        sorted(found), partial(_files, mapping), partial(_read, mapping), mapping.units
    )


def _matches(folder: Path, patterns: Iterable[str]) -> list[str]:
    found = [path for pattern in patterns for path in folder.glob(pattern) if path.is_file()]
    return sorted({str(path.relative_to(folder)) for path in found})


def _files(mapping: RunMapping, path: str) -> list[tuple[str, str]]:
    names = _matches(Path(path), mapping.metrics)
    names += [name for name in (mapping.config, mapping.result) if name is not None]
    return [(name, os.path.join(path, name)) for name in names]  # noqa: PTH118


def _read(mapping: RunMapping, path: str) -> RunData:
    data = RunData(path, os.path.basename(path))  # noqa: PTH119
    data.signatures = [signature(*file) for file in _files(mapping, path)]
    names = mapping.names
    files = {
        name: [
            {names.get(key, key): value for key, value in row.items()}
            for row in _guarded(data, path, name, _rows_of) or []
        ]
        for name in _matches(Path(path), mapping.metrics)
    }
    rows, problems = joined_rows(files, mapping.rows)
    data.problems += problems
    lines = columns_of(rows)
    config = (mapping.config and _guarded(data, path, mapping.config, _object_of)) or {}
    # A run that has not ended has no result yet.
    ended = mapping.result is not None and os.path.lexists(f"{path}/{mapping.result}")
    result = (ended and _guarded(data, path, mapping.result or "", _object_of)) or {}
    for name, value in (("config", config), ("result", result)):
        if value:
            data.documents[name] = json.dumps(value, default=str).encode(errors="backslashreplace")
    data.summary = summary_of(lines)
    if lines.columns:
        data.metrics = structured(lines.columns, lines.rows)
    data.facts = facts_of({"seed": _integer(flat(config).get(mapping.seed))}, {}, (), lines, result)
    if result.get("state") not in STATES:
        done = mapping.result is None or bool(result)
        data.facts["state"] = mapping.state or ("finished" if done else "unfinished")
    return data


def joined_rows(
    files: Mapping[str, Sequence[Row]], kind: Literal["log", "samples"] | None = None
) -> tuple[Sequence[Row], list[tuple[str, str]]]:
    """Return the rows of all files of a run, and problems, each with the name of a file.

    Files with the same columns are parts of one log: their rows are joined in order, and a smaller step is a
    restart. Files with other columns are separate logs (training and validation): in each, rows that a
    restart computed again are removed; then all rows are sorted by step, without the column ``restart``.

    Rows of ``samples`` have no order: all are kept, and a sample that a log has twice is a problem.
    """
    logs: dict[frozenset[str], list[Row]] = {}
    problems = []
    for name, rows in files.items():
        if not rows:
            continue
        log = logs.setdefault(frozenset(chain.from_iterable(rows)), [])
        # TensorBoard begins a file at each start.
        if kind is None and _TENSORBOARD not in name and _overlap(log, rows):
            problems.append((name, _RANKS))
        log.extend(rows)
    if kind == "samples":
        for log in logs.values():
            counts = Counter(map(_step_of, log))
            twice = [step for step, count in counts.items() if count > 1 and step > -math.inf]
            if twice:
                what = f"{len(twice)} samples are in several rows, such as {min(twice):g}"
                problems.append(("", what))
    elif len(logs) < 2:
        return [row for log in logs.values() for row in log], problems
    keep = list if kind == "samples" else _kept
    kept = sorted((row for log in logs.values() for row in keep(log)), key=_step_of)
    return [
        {key: value for key, value in row.items() if key not in ("restart", "in_place")}
        for row in kept
    ], problems


def _overlap(before: Sequence[Row], after: Sequence[Row]) -> bool:
    steps = [step for step in map(_step_of, after) if step > -math.inf]
    return min(steps, default=math.inf) < max(map(_step_of, before), default=-math.inf)


def _kept(rows: Sequence[Row]) -> Iterable[Row]:
    lines = columns_of(
        [{key: row[key] for key in ("step", "restart", "in_place") if key in row} for row in rows]
    )
    keep = counted(lines.columns, lines.rows)
    return rows if keep is None else compress(rows, keep)


def _step_of(row: Row) -> float:
    """Return the step; a row without a step is first, so that it does not count as a restart."""
    step = row.get("step")
    return step if isinstance(step, int | float) and not math.isnan(step) else -math.inf


def _integer(value: Any) -> Any:
    return int(value) if isinstance(value, str) and value.isdigit() else value


def _guarded(data: RunData, path: str, name: str, read: Any) -> Any:
    """Return the result of ``read`` for a file; record an error as a problem."""
    try:
        found, problems = read(Path(path, name))
    except FileNotFoundError:
        data.problems.append((name, "is missing"))
        return None
    except OSError as error:
        data.problems.append((name, f"cannot be read: {error.strerror or error}"))
        return None
    # h5py raises RuntimeError for a damaged file.
    except (ValueError, TypeError, LookupError, RuntimeError, csv.Error, ConfigError) as error:
        data.problems.append((name, f"cannot be parsed: {' '.join(str(error).split())[:200]}"))
        return None
    data.problems += [(name, what) for what in problems]
    return found


def _rows_of(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    if _TENSORBOARD in path.name:
        return _tensorboard_rows(path), []
    if path.suffix in (".csv", ".tsv"):
        return _csv_rows(path)
    if path.suffix in (".h5", ".hdf5"):
        with h5py.File(path, locking=False) as file:
            return _json_rows({name: _values(part[:]) for name, part in file.items()}), []
    raw = path.read_bytes()
    if path.suffix == ".json":
        return _json_rows(json.loads(raw)), []
    if path.suffix != ".jsonl" and raw.strip() and not raw.lstrip().startswith(b"{"):
        raise ResultsError(
            f"{path}: has a format that hpcrun does not read; `metrics` takes .csv, .tsv, .json, .jsonl, .h5 "
            "and TensorBoard files"
        )
    rows, damaged, torn = parse_lines(raw)
    return rows, line_problems(damaged, torn)


def _values(column: NDArray[Any]) -> list[Any]:
    return [cell.decode() if isinstance(cell, bytes) else cell for cell in column.tolist()]


def _csv_rows(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    raw = path.read_bytes()
    # The writer may be in the middle of a number.
    end = raw.rfind(b"\n") + 1
    text = raw[:end].decode("utf-8-sig")
    reader = csv.reader(
        io.StringIO(text, newline=""), delimiter="\t" if path.suffix == ".tsv" else ","
    )
    head = next(reader, [])
    rows, damaged = [], 0
    for cells in reader:
        if len(cells) == len(head):
            rows.append(
                {name: _cell(cell) for name, cell in zip(head, cells, strict=True) if cell != ""}
            )
        elif cells:
            damaged += 1
    return rows, line_problems(damaged, len(raw) - end if raw[end:].strip() else 0)


def _cell(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _json_rows(value: Any) -> list[dict[str, Any]]:
    """Return the rows of a list of objects, or of an object of equal lists."""
    if isinstance(value, list) and all(isinstance(row, dict) for row in value):
        return value
    if isinstance(value, dict):
        columns = {key: cells for key, cells in value.items() if isinstance(cells, list)}
        if columns and len(set(map(len, columns.values()))) == 1:
            return [
                dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)
            ]
        if not columns:
            return [value]
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
    rows: dict[int, dict[str, Any]] = {}
    for tag in events.Tags()["scalars"]:
        for event in events.Scalars(tag):
            row = rows.setdefault(event.step, {"step": event.step, "time": event.wall_time})
            row[tag] = event.value
    for tag in events.Tags()["tensors"]:
        for event in events.Tensors(tag):
            value = tensor_util.make_ndarray(event.tensor_proto)
            if value.size == 1 and np.issubdtype(value.dtype, np.number):
                row = rows.setdefault(event.step, {"step": event.step, "time": event.wall_time})
                row[tag] = value.item()
    return [rows[step] for step in sorted(rows)]


def _object_of(path: Path) -> tuple[dict[str, Any], list[str]]:
    text = path.read_text()
    if path.suffix == ".json":
        value = json.loads(text)
    else:
        value, _ = read_yaml(text, lambda line: f"line {line}")
    if not isinstance(value, dict):
        raise ValueError("should be keys and values")
    return value, []
