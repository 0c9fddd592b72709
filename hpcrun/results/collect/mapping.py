"""Runs of other programs, described by a small YAML file."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import h5py
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hpcrun.config import ConfigError
from hpcrun.config.reader import read_yaml
from hpcrun.errors import ResultsError
from hpcrun.results.collect.aggregate import RunSource
from hpcrun.results.collect.columns import (
    columns_of,
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

Row = dict[str, Any]


class RunMapping(BaseModel):
    """The places of a run's files below its directory, and the meaning of their columns."""

    model_config = ConfigDict(extra="forbid")

    runs: str = Field(default="*", description="Glob of the run directories.")
    metrics: list[str] = Field(description="Globs: CSV, JSONL or HDF5 files.")
    config: str | None = Field(default=None, description="YAML or JSON file.")
    result: str | None = Field(default=None, description="JSON file.")
    step: str | None = Field(default=None, description="The column of the step.")
    rename: dict[str, str] = Field(default={}, description="New names of columns.")
    units: dict[str, str] = Field(default={}, description="Units of columns.")
    seed: str = Field(default="seed", description="The config's key of the seed.")

    @property
    def names(self) -> dict[str, str]:
        """The new name of each column that gets one."""
        return self.rename | ({self.step: "step"} if self.step is not None else {})


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
    files = [
        [
            {mapping.names.get(key, key): value for key, value in row.items()}
            for row in _guarded(data, path, name, _rows_of) or []
        ]
        for name in _matches(Path(path), mapping.metrics)
    ]
    lines = columns_of(_merged(data, files))
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
        data.facts["state"] = "finished" if done else "unfinished"
    return data


def _merged(data: RunData, files: Iterable[Sequence[Row]]) -> Sequence[Row]:
    """Return the rows of all files, sorted by step; a step that files of one kind have twice is a problem.

    Files with the same columns are of one kind, such as those of the ranks. Training and validation have
    different columns, and share steps.
    """
    rows = list(chain.from_iterable(files))
    kinds: dict[frozenset[str], Counter[float]] = {}
    for row in rows:
        kinds.setdefault(frozenset(row), Counter())[_step_of(row)] += 1
    for counts in kinds.values():
        twice = [step for step, count in counts.items() if count > 1 and step > -math.inf]
        if twice:
            what = f"{len(twice)} steps are in several rows, such as {min(twice):g}"
            data.problems.append(("", what))
    rows.sort(key=_step_of)
    # These columns would hide rows, as after a restart of a run of hpcrun.
    hidden = ("restart", "in_place")
    return [{key: value for key, value in row.items() if key not in hidden} for row in rows]


def _step_of(row: Row) -> float:
    """Return the step; a row without a step is first."""
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


def _rows_of(path: Path) -> tuple[list[Row], list[str]]:
    if path.suffix in (".csv", ".tsv"):
        return _csv_rows(path)
    if path.suffix in (".h5", ".hdf5"):
        return _hdf5_rows(path), []
    if path.suffix != ".jsonl":
        raise ResultsError(
            f"{path}: has a format that hpcrun does not read; use .csv, .tsv, .jsonl or .h5 files"
        )
    rows, damaged, torn = parse_lines(path.read_bytes())
    return rows, line_problems(damaged, torn)


def _hdf5_rows(path: Path) -> list[Row]:
    """Return a row for each place of the datasets at the top of the file, which have one length."""
    with h5py.File(path, locking=False) as file:
        columns = {name: part[:].tolist() for name, part in file.items()}
    return [
        {
            name: cell.decode() if isinstance(cell, bytes) else cell
            for name, cell in zip(columns, cells, strict=True)
        }
        for cells in zip(*columns.values(), strict=True)
    ]


def _csv_rows(path: Path) -> tuple[list[Row], list[str]]:
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


def _object_of(path: Path) -> tuple[dict[str, Any], list[str]]:
    text = path.read_text()
    if path.suffix == ".json":
        value = json.loads(text)
    else:
        value, _ = read_yaml(text, lambda line: f"line {line}")
    if not isinstance(value, dict):
        raise ValueError("should be keys and values")
    return value, []
