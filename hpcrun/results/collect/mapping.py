"""Runs of other programs, described by a small YAML file."""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError

from hpcrun.config import ConfigError
from hpcrun.config.reader import read_yaml
from hpcrun.errors import ResultsError
from hpcrun.results.collect.aggregate import RunSource
from hpcrun.results.collect.column_types import misfit_problems
from hpcrun.results.collect.columns import (
    ParsedLines,
    counted,
    flat,
    joined_lines,
    selected,
    structured,
    summary_of,
)
from hpcrun.results.collect.foreign import (
    TENSORBOARD,
    is_array_file,
    read_metrics,
    read_parameters,
)
from hpcrun.results.collect.run_reader import (
    STATES,
    RunData,
    facts_of,
    files_of,
    is_run,
    last_step,
    read_run,
    signature,
)
from hpcrun.results.collect.tables import FileContent
from hpcrun.run.files import read_at_most
from hpcrun.run.journal.state import State

_RANKS = (
    "goes back to an earlier step, and a restart hides rows; add `rows: samples` to the mapping "
    "for samples or files of several ranks, or `rows: log` for restarts"
)
_REPAIR = "repair the files, or leave the run out with `runs`"
_SHOWN = 12
Found = TypeVar("Found")


class RunMapping(BaseModel):
    """The places of a run's files below its directory, and the meaning of their columns.

    Attributes:
        rows: ``log``: a step that goes back is a restart. ``samples``: rows in any order and file.
        datasets: dataset or attribute of each column, in HDF5 and NPZ files. Default: all datasets.
        axis: axis of the rows in these datasets.
        samples: number of samples of a run, or the config's key of this number.
        state: of all runs. Default: finished if there is a result file or none is named.
    """

    model_config = ConfigDict(extra="forbid")

    runs: str = "*"
    metrics: list[str]
    rows: Literal["log", "samples"] | None = None
    datasets: dict[str, str] = {}
    axis: int = 0
    samples: int | str | None = None
    config: str | None = None
    result: str | None = None
    step: str | None = None
    time: str | None = None
    rename: dict[str, str] = {}
    units: dict[str, str] = {}
    seed: str = "seed"
    state: Literal["finished", "unfinished"] | None = None

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
        text = read_at_most(path, 1 << 20).decode()
        value, _ = read_yaml(text, lambda line: f"{path}:{line}")
        if not isinstance(value, dict):
            raise ResultsError(f"{path}: should be keys and values, such as `metrics: x.csv`")
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
        what = f"{first['msg'].lower()}; the keys are {', '.join(RunMapping.model_fields)}"
        raise ResultsError(f"{path}: {where}: {what}") from None
    for pattern in (mapping.runs, *mapping.metrics, mapping.config or "", mapping.result or ""):
        if Path(pattern).is_absolute() or ".." in Path(pattern).parts:
            raise ResultsError(f"{path}: {pattern}: should be a path below the run's directory")
    return mapping


def mapped_source(mapping: RunMapping, named: Iterable[str], runs_dir: Path) -> RunSource:
    """Return the runs that ``named`` name and that have a file of metrics.

    Args:
        mapping: the places of their files.
        named: folders of runs, or runs; also names below ``runs_dir``.
        runs_dir: the folder of the runs of hpcrun.

    Raises:
        ResultsError: a folder has none.
    """
    found: dict[str, None] = {}
    for name in named:
        folder = next((path for path in (Path(name), runs_dir / name) if path.is_dir()), None)
        if not name or folder is None:
            raise ResultsError(
                f"{name}: no such directory, neither here nor in {runs_dir}; name a run or a folder of runs"
            )
        below = [folder] if mapping.runs == "." else folder.glob(mapping.runs)
        here = [
            os.path.realpath(path)
            for path in below
            if path.is_dir() and _matches(path, mapping.metrics)
        ]
        if not here and _matches(folder, mapping.metrics):
            here = [os.path.realpath(folder)]
        if not here:
            raise ResultsError(
                f"{folder}: no directory {mapping.runs} has a file {' or '.join(mapping.metrics)}; "
                "change `runs` or `metrics` in the mapping"
            )
        found |= dict.fromkeys(here)
    return RunSource(sorted(found), partial(_files, mapping), partial(_read, mapping))


def _matches(folder: Path, patterns: Iterable[str]) -> list[str]:
    """Return the files of a run, without links to other files of the run: rank2 comes before rank10."""
    found = {
        os.path.realpath(path): str(path.relative_to(folder))
        for pattern in filter(None, patterns)
        for path in sorted(folder.glob(pattern), reverse=True)
        if path.is_file()
    }
    return sorted(
        found.values(), key=lambda name: re.sub(r"\d+", lambda digits: digits[0].zfill(20), name)
    )


def _files(mapping: RunMapping, path: str) -> list[tuple[str, str]]:
    names = _matches(Path(path), [*mapping.metrics, mapping.config or ""])
    names += [mapping.result] if mapping.result else []
    here = files_of(path) if _own(mapping, path) else []
    # Another mapping reads the runs again.
    here.append((f"mapping {zlib.crc32(mapping.model_dump_json().encode()):08x}", ""))
    return here + [(name, f"{path}/{name}") for name in names]


def _own(mapping: RunMapping, path: str) -> bool:
    """Return True if config and state of a run are those of hpcrun."""
    return not (mapping.config or mapping.result or mapping.state) and is_run(path)


class _MappedRun:
    """Reader of one run."""

    def __init__(self, mapping: RunMapping, path: str) -> None:
        self._own = _own(mapping, path)
        self._mapping, self._path = mapping, Path(path)
        self._data = read_run(path) if self._own else RunData(path, self._path.name)
        self._data.signatures = [signature(*file) for file in _files(mapping, path)]
        # The columns of all files, by their names there.
        self._columns: dict[str, None] = {}

    def read(self) -> RunData:
        data, mapping = self._data, self._mapping
        if self._own:
            lines = self._lines(flat(json.loads(data.documents.get("config", b"{}"))))
            data.facts |= {"rows": lines.rows, "step": last_step(lines, {})}
        else:
            names = _matches(self._path, [mapping.config or ""])
            config = flat(self._document("config", names[0] if names else mapping.config))
            # A run that has not ended has no result yet.
            ended = (self._path / (mapping.result or "")).is_file()
            result = self._document("result", mapping.result if ended else None)
            done = mapping.result is None or bool(result)
            state = mapping.state or ("finished" if done else "unfinished")
            state = result["state"] if result.get("state") in STATES else state
            data.facts["state"] = state
            lines = self._lines(config)
            seed = config.get(mapping.seed)
            seed = int(seed) if isinstance(seed, str) and seed.isdigit() else seed
            data.facts = facts_of({"seed": seed}, {}, State(()), lines, result) | {"state": state}
        data.metrics = structured(lines.columns, lines.rows) if lines.columns else None
        data.summary = summary_of(lines)
        return data

    def _document(self, name: str, file: str | None) -> dict[str, Any]:
        value = (file and self._guarded(file, read_parameters)) or {}
        if value:
            raw = json.dumps(value, default=str).encode(errors="backslashreplace")
            self._data.documents[name] = raw
        return value

    def _lines(self, config: Mapping[str, Any]) -> ParsedLines:
        """Return the rows of all files.

        Files with the same columns are parts of one log: their rows are joined in order, and a smaller step
        is a restart. Files with other columns are separate logs (training and validation): in each, rows
        that a restart computed again are removed; then all rows are sorted by step.

        Rows of ``samples`` have no order, and all are kept. A sample that is lost, or twice in a log, is an
        error.
        """
        logs: list[dict[str, ParsedLines]] = []
        for name in _matches(self._path, self._mapping.metrics):
            lines = self._content(name)
            if not lines.rows:
                continue
            here = lines.columns.keys()
            if self._mapping.rows == "samples":  # A sample has one value in each column.
                log = next((log for log in logs if here & _names(log) - {"step", "time"}), None)
            else:  # A file without a validation so far has a part of the columns.
                log = next(
                    (log for log in logs if here <= _names(log) or _names(log) <= here), None
                )
            steps = _steps(lines)
            steps = steps[steps > -np.inf]
            before = -np.inf if log is None else max(_steps(one).max() for one in log.values())
            # TensorBoard begins a file at each start.
            back = (steps < before).any() and TENSORBOARD not in name
            if is_array_file(self._path / name):
                back = (steps <= before).any() or (np.diff(steps) <= 0).any()
            if back and not self._mapping.rows:
                self._error(name, _RANKS)
            if log is None:
                logs.append({name: lines})
            else:
                log[name] = lines
        self._note_missing()
        wholes = [joined_lines(log.values()) for log in logs]
        for log, whole in zip(logs, wholes, strict=True):
            self._note_other_files(log, whole)
        if self._mapping.rows == "samples":
            if self._data.facts["state"] == "finished":
                for name, what in self._data.problems:
                    self._error(name, f"{what}; {_REPAIR}")
            for log, whole in zip(logs, wholes, strict=True):
                self._check_samples(log, _steps(whole), config)
        elif len(wholes) < 2:
            return wholes[0] if wholes else ParsedLines()
        else:
            for at, whole in enumerate(wholes):
                keep = counted(whole.columns, whole.rows)
                wholes[at] = whole if keep is None else selected(whole, np.flatnonzero(keep))
        every = joined_lines(wholes)
        order = np.argsort(_steps(every), kind="stable")
        without = () if self._mapping.rows == "samples" else ("restart", "in_place")
        return selected(every, order, without=without)

    def _note_other_files(self, log: Mapping[str, ParsedLines], whole: ParsedLines) -> None:
        """Name the values that do not fit only because another file of the ``log`` has another type."""
        named = [what for name, what in self._data.problems if name in log]
        odd = [
            one
            for one in whole.misfits
            if not any(what.startswith(f"{one.column}: ") for what in named)
        ]
        found = misfit_problems(odd, {}, "row")
        self._data.problems += [(" and ".join(log), what) for what in found]

    def _note_missing(self) -> None:
        """Name the columns of the mapping that no file has."""
        mapping = self._mapping
        wanted: dict[str | None, str] = {mapping.step: "step", mapping.time: "time"}
        wanted.update(dict.fromkeys(mapping.rename, "rename"))
        if not self._columns:
            return
        has = ", ".join([*self._columns][:_SHOWN]) + ", …" * (len(self._columns) > _SHOWN)
        for column, key in wanted.items():
            if column is not None and column not in self._columns:
                what = f"has no column {column}, which `{key}` names; there is {has}"
                self._data.problems.append((" and ".join(mapping.metrics), what))

    def _content(self, name: str) -> ParsedLines:
        """Return the columns of a file under their new names, and note their units and meanings."""
        mapping, described = self._mapping, self._data.described
        read = partial(read_metrics, datasets=mapping.datasets, axis=mapping.axis)
        content = self._guarded(name, read) or FileContent()
        new = mapping.names
        lines = content.lines
        self._columns.update(dict.fromkeys(lines.columns))
        if content.restarts is not None and mapping.rows != "samples":
            lines.columns["restart"] = content.restarts
        count = len(lines.columns)
        lines.columns = {new.get(key, key): column for key, column in lines.columns.items()}
        if len(lines.columns) < count:
            self._error(name, "has two columns for one name; correct `rename`, `step` or `time`")
        lines.present = {new.get(key, key): rows for key, rows in lines.present.items()}
        self._data.problems += [(name, what) for what in content.problems + lines.cut]
        found = {new.get(key, key): value for key, value in content.described.items()}
        for key in lines.columns:
            unit, meaning, place = found.get(key, ("", "", ""))
            new_facts = (mapping.units.get(key, unit), meaning, f"{name} {place}".rstrip())
            unit, _, source = described.setdefault(key, new_facts)
            if unit and new_facts[0] not in ("", unit):
                units = f"the unit {new_facts[0]}, and {unit} in {source}"
                self._error(name, f"{key} has {units}; convert one, or declare the unit in `units`")
        return lines

    def _check_samples(
        self, log: Mapping[str, ParsedLines], steps: NDArray[Any], config: Mapping[str, Any]
    ) -> None:
        wanted: Any = self._mapping.samples
        values, counts = np.unique(steps, return_counts=True)
        twice = values[counts > 1]
        whole = bool(np.isfinite(values).all() and (values % 1 == 0).all())
        if values[0] == -np.inf:
            what = f"has a row without a number in {self._mapping.step or 'step'}; see `step`"
            self._error(min(log), what)
        elif len(twice):
            owners = np.repeat(list(log), [lines.rows for lines in log.values()])
            names = " and ".join(dict.fromkeys(owners[steps == twice[0]].tolist()))
            what = f"{len(twice):,} samples are there twice, such as {twice[0]}; {_REPAIR}"
            self._error(names, what)
        elif self._data.facts["state"] == "finished" and (wanted is not None or whole):
            default = int(values[-1] - values[0]) + 1 if whole else 0
            wanted = config.get(wanted) if isinstance(wanted, str) else wanted or default
            gaps = values[:-1][np.diff(values) > 1]
            lost = f", without {gaps[0] + 1}" if len(gaps) else ""
            if len(values) != wanted:
                found = f"{len(values):,} samples from {values[0]} to {values[-1]}{lost}"
                what = f"has {found}, and should have {wanted}; {_REPAIR}, or correct `samples`"
                self._error("", what)

    def _error(self, name: str, what: str) -> None:
        self._data.errors.append(f"{self._path / name}: {what}")

    def _guarded(self, name: str, read: Callable[[Path], Found]) -> Found | None:
        """Return the result of ``read`` for a file; record an error as a problem."""
        try:
            return read(self._path / name)
        except FileNotFoundError:
            what = "is missing"
        except OSError as error:
            what = f"cannot be read: {error.strerror or error}"
        except ResultsError:
            raise
        # h5py raises RuntimeError for a damaged file; protobuf and zipfile raise errors of their own.
        except Exception as error:
            what = f"cannot be parsed: {' '.join(str(error).split())[:400]}"
        self._data.problems.append((name, what))
        return None


def _names(log: Mapping[str, ParsedLines]) -> set[str]:
    return {column for lines in log.values() for column in lines.columns}


def _steps(lines: ParsedLines) -> NDArray[Any]:
    """Return the steps; a row without a step is first, so that it does not count as a restart."""
    steps = lines.columns.get("step", np.full(lines.rows, np.nan))
    if steps.dtype.kind not in "if":
        return np.full(lines.rows, -np.inf)
    return np.where(np.isnan(steps), -np.inf, steps) if steps.dtype.kind == "f" else steps


def _read(mapping: RunMapping, path: str) -> RunData:
    return _MappedRun(mapping, path).read()
