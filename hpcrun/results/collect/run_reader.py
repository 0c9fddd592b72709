"""One run directory as arrays and documents."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import orjson
from numpy.typing import NDArray

from hpcrun.config import ConfigError, masked_values
from hpcrun.config.reader import read_yaml
from hpcrun.errors import ResultsError
from hpcrun.results.collect.column_types import line_numbers, misfit_problems
from hpcrun.results.collect.columns import (
    NO_STEP,
    ParsedLines,
    parse_lines,
    parse_rows,
    read_lines,
    step_at_end,
    structured,
    summary_of,
    texts,
)
from hpcrun.run.directory import RunDirectory
from hpcrun.run.files import open_regular, without_comment_crc, without_hash
from hpcrun.run.journal.events import Ended, Event, Finished, to_events
from hpcrun.run.journal.state import State

Signature = tuple[str, int, int, int]
"""A file's name in the run directory, size (-1: no file), time of change in nanoseconds, and inode."""

STATES = ("finished", "cancelled", "pruned", "stopped", "failed")
_NO_FILE = (-1, 0, 0)
# Names, because a Path for each of fifty thousand files costs time in a call that finds nothing changed.
_RUN = RunDirectory(Path())
_FILES = tuple(
    file.name for file in (_RUN.config, _RUN.record, _RUN.events, _RUN.metrics, _RUN.result)
)
# A table has one width for all its rows.
_LONGEST_FIELDS, _LONGEST_TEXT = 480, 60
_SECTION = re.compile(r"^(?=[A-Za-z_])", re.MULTILINE)
# Aliases, tags and documents join sections.
_JOINING = ("&", "*", "%", "---", "...")


@dataclass
class RunData:
    """The content of a run.

    Args:
        problems: a file and its problem.
        errors: why no results may be written, a line each.
        described: unit, meaning and source of each column of metrics that hpcrun has not written.
    """

    path: str
    name: str
    signatures: list[Signature] = field(default_factory=list)
    problems: list[tuple[str, str]] = field(default_factory=list)
    metrics: NDArray[Any] | None = None
    events: NDArray[Any] | None = None
    documents: dict[str, bytes] = field(default_factory=dict)
    summary: list[tuple[Any, ...]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    described: dict[str, tuple[str, str, str]] = field(default_factory=dict)


def files_of(path: str) -> list[tuple[str, str]]:
    """Return the files of the run directory ``path`` that the results hold: name and path."""
    return [(name, f"{path}/{name}") for name in _FILES]


def signature(name: str, path: str) -> Signature:
    """Return a value that changes when the file ``path`` changes."""
    try:
        found = os.stat(path)  # noqa: PTH116  (see _FILES)
    except OSError:
        return (name, *_NO_FILE)
    return (name, found.st_size, found.st_mtime_ns, found.st_ino)


def read_run(path: str) -> RunData:
    """Return the content of a run directory; unreadable parts are recorded as problems."""
    reader = _Reader(path)
    run = RunDirectory(Path(path))
    try:
        config = reader.config(run.config)
        identity = reader.document("identity", run.record)
        events = reader.events(run.events)
        lines = reader.metrics(run.metrics)
        result = reader.document("result", run.result, needed=False)
        reader.data.facts = facts_of(config, identity, events, lines, result)
        for file, key, value in (
            (run.record, "created", identity.get("created")),
            (run.result, "time", result.get("time")),
        ):
            if isinstance(value, int) and math.isnan(_number(value)):
                reader.data.problems.append((file.name, f"{key}: is too large, and read as NaN"))
        if "sweep" in identity:
            reader.data.facts["sweep"] = run.path.parent.name
    except (ArithmeticError, LookupError, TypeError, ValueError, RecursionError) as error:
        # One strange file must not prevent the results of all other runs.
        what = f"cannot be understood: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        empty = RunData(path, reader.data.name, problems=[("", what)])
        empty.signatures = [signature(*file) for file in files_of(path)]
        empty.facts = facts_of({}, {}, State(()), ParsedLines(), {})
        return empty
    return reader.data


class _Reader:
    def __init__(self, path: str) -> None:
        self.data = RunData(path, os.path.basename(path))  # noqa: PTH119

    def _bytes(self, path: Path, *, needed: bool) -> bytes | None:
        try:
            with open_regular(path) as stream:
                self._sign(path, os.fstat(stream.fileno()))
                return stream.read()
        except OSError as error:
            self._unreadable(path, error, needed=needed)
            return None

    def _sign(self, path: Path, found: os.stat_result) -> None:
        # Taken before the first byte is read, so that later lines count as a change.
        self.data.signatures.append((path.name, found.st_size, found.st_mtime_ns, found.st_ino))

    def _unreadable(self, path: Path, error: OSError, *, needed: bool) -> None:
        self.data.signatures.append((path.name, *_NO_FILE))
        if isinstance(error, FileNotFoundError | NotADirectoryError):
            if needed:
                self._problem(path, "is missing")
        else:
            self._problem(path, f"cannot be read: {error.strerror}")

    def _problem(self, path: Path, what: str) -> None:
        self.data.problems.append((path.name, what))

    def config(self, path: Path) -> dict[str, Any]:
        raw = self._bytes(path, needed=True)
        if raw is None:
            return {}
        try:
            text, intact = without_comment_crc(raw.decode())
            if not intact:
                self._problem(path, "was changed after hpcrun wrote it")
            # The results are shared, and the URL of a webhook is a secret.
            values = masked_values(parse_config(text))
            self.data.documents["config"] = _dumped(values)
        except (ValueError, TypeError, RecursionError) as error:
            self._problem(path, f"is no config: {' '.join(str(error).split())[:200]}")
            return {}
        return values

    def document(self, name: str, path: Path, *, needed: bool = True) -> dict[str, Any]:
        raw = self._bytes(path, needed=needed)
        if raw is None:
            return {}
        rows, _ = parse_rows(raw.replace(b"\n", b" "))
        value = without_hash(rows[0]) if len(rows) == 1 else None
        if value is None:
            self._problem(path, "is no JSON object, or its checksum is wrong")
            return {}
        self.data.documents[name] = _dumped(value)
        return value

    def metrics(self, path: Path) -> ParsedLines:
        try:
            with open_regular(path) as stream:
                self._sign(path, os.fstat(stream.fileno()))
                lines = read_lines(stream)
                odd = named_misfits(lines, stream)
        except OSError as error:
            self._unreadable(path, error, needed=False)
            return ParsedLines()
        self._problems(path, line_problems(lines.damaged, lines.torn) + lines.cut + odd)
        self.data.summary = summary_of(lines)
        if lines.columns:
            self.data.metrics = structured(lines.columns, lines.rows)
        return lines

    def events(self, path: Path) -> State:
        raw = self._bytes(path, needed=False)
        if not raw:
            return State(())
        rows, damaged, torn = parse_lines(raw)
        events = to_events(rows)
        self._problems(path, line_problems(damaged + len(rows) - len(events), torn))
        if events:
            self.data.events = _event_table(events)
        return State(events)

    def _problems(self, path: Path, found: Iterable[str]) -> None:
        for what in found:
            self._problem(path, what)


def named_misfits(lines: ParsedLines, stream: BinaryIO) -> list[str]:
    """Return a line for each kind of value that does not fit its column.

    Args:
        lines: the content of ``stream``.
        stream: a file of JSON lines, from which the numbers of the lines are read.

    Raises:
        OSError: the file cannot be read.
    """
    if not lines.misfits:
        return []
    stream.seek(0)
    rows = (row for one in lines.misfits for row in one.rows.tolist())
    return misfit_problems(lines.misfits, line_numbers(stream, rows))


def line_problems(damaged: int, torn: int, places: Sequence[int] = ()) -> list[str]:
    """Return what is wrong with so many damaged lines, and a last line of ``torn`` bytes.

    Args:
        damaged: number of damaged lines.
        torn: bytes of a last line without an end.
        places: the numbers of the first damaged lines, if known.
    """
    where = f" ({', '.join(map(str, places))}{', …' * (damaged > len(places))})" if places else ""
    found = [f"{damaged} damaged line{'s' * (damaged > 1)}{where}"] if damaged else []
    return found + ([f"torn last line ({torn} bytes)"] if torn else [])


def parse_config(text: str) -> dict[str, Any]:
    """Return the values of a run's config.yaml.

    The runs of a sweep share most of their sections: each different section is parsed once.

    Raises:
        ValueError: the text is not the YAML of a config.
    """
    if any(mark in text for mark in _JOINING):
        return dict(_parse(text))
    values: dict[str, Any] = {}
    for section in _SECTION.split(text):
        found = _parse(section)
        if values.keys() & found.keys():
            raise ValueError(f"has the key {', '.join(values.keys() & found.keys())} twice")
        values |= found
    return values


@lru_cache(maxsize=4096)
def _parse(text: str) -> Mapping[str, Any]:
    try:
        value, _ = read_yaml(text, lambda line: f"line {line}")
    except ConfigError as error:
        raise ValueError(" ".join(str(error).split())) from None
    if not isinstance(value, dict | None):
        raise ValueError("is not keys and values")
    return value or {}


def _event_table(events: Sequence[Event]) -> NDArray[Any]:
    attempts = [event.attempt for event in events]
    restarts = [NO_STEP if one is None else one.restart for one in attempts]
    steps = [NO_STEP if event.step is None else event.step for event in events]
    columns = {
        "time": np.array([event.time for event in events], np.float64),
        "event": _padded(event.tag for event in events),
        "job": _padded(None if one is None else one.job for one in attempts),
        "restart": np.array(restarts, np.int64),
        "cause": _padded(event.cause for event in events),
        "step": np.array(steps, np.int64),
        "fields": _padded(map(_fields, events)),
    }
    return structured(columns, len(events))


def _fields(event: Event) -> str | None:
    """Return the other fields of an event as JSON. In a long event, texts are cut and lists omitted."""
    # The table has no column for the number of the restart in place.
    in_place = event.attempt.in_place if event.attempt else 0
    every = {"in_place": in_place, **event.own} if in_place else event.own
    plain = {
        key: value[:_LONGEST_TEXT] if isinstance(value, str) else value
        for key, value in every.items()
        if not isinstance(value, list | dict)
    }
    for fields in (every, plain | {"cut": True}, {"cut": True}):
        whole = json.dumps(fields, ensure_ascii=False, separators=(",", ":"))
        if len(whole) <= _LONGEST_FIELDS:
            break
    return whole if every else None


def _padded(values: Iterable[str | None]) -> NDArray[Any]:
    """Return texts in one of few widths, so that most runs share their type."""
    found = texts(values)
    return found.astype(f"S{max(8, 1 << (found.dtype.itemsize - 1).bit_length())}")


def facts_of(
    config: dict[str, Any],
    identity: dict[str, Any],
    journal: State,
    lines: ParsedLines,
    result: dict[str, Any],
) -> dict[str, Any]:
    """Return the cells of the table ``runs`` that come from the files."""
    started = {event.attempt for event in journal.openings if event.attempt}
    state = result.get("state")
    if state not in STATES:
        state = "unfinished" if started or lines.rows else "new"
    ended = [event.time for event in journal.of_kind(Ended, Finished)]
    last = result.get("time", ended[-1] if ended and state in STATES else None)
    return {
        "sweep": "",
        "state": state,
        "cause": _text_of(result.get("cause")),
        "reason": _text_of(result.get("reason")),
        "executor": _text_of(identity.get("executor")),
        "created": _number(identity.get("created")),
        "ended": _number(last),
        "attempts": len(started),
        "step": last_step(lines, result),
        "rows": lines.rows,
        "seed": _whole(config.get("seed")),
    }


def last_step(lines: ParsedLines, result: dict[str, Any]) -> int:
    """Return the last logged step, or that of the result; -1 if neither has one."""
    found = step_at_end(lines)
    return _whole(result.get("steps", result.get("step"))) if found is None else found


def _text_of(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _dumped(value: Any) -> bytes:
    try:
        return orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS)
    except TypeError:
        # A whole number beyond 64 bits.
        return json.dumps(value).encode()


def _number(value: Any) -> float:
    with contextlib.suppress(OverflowError):
        return float(value) if isinstance(value, int | float) else float("nan")
    return float("nan")


def _whole(value: Any) -> int:
    return value if isinstance(value, int) and 0 <= value < 2**63 else NO_STEP


# A sweep may have subfolders; a folder of data may have a million of them.
_DEEPEST = 3


def find_runs(named: Iterable[str], runs_dir: Path) -> list[str]:
    """Return the real paths of all runs, each once, in the order of their names.

    Args:
        named: run directories, folders of them, or names below ``runs_dir``.

    Raises:
        ResultsError: a name is not a directory, or contains no run.
    """
    found: dict[str, None] = {}
    for name in named:
        folder = next((path for path in (Path(name), runs_dir / name) if path.is_dir()), None)
        if not name or folder is None:
            raise ResultsError(
                f"{name}: no such directory, neither here nor in {runs_dir}; name a run directory or a "
                "folder of them"
            )
        # A link to a run is not a second run.
        here = _below(os.path.realpath(folder), 0)
        if not here:
            raise ResultsError(
                f"{folder}: contains no run directories; name one, or a folder of them"
            )
        found |= dict.fromkeys(here)
    return sorted(found)


def _below(folder: str, depth: int) -> list[str]:
    """Return the real paths of the runs in ``folder``, a real path."""
    if is_run(folder):
        return [folder]
    try:
        with os.scandir(folder) as entries:
            # Path.resolve() asks for each part of the path; among ten thousand runs only links need it.
            inner = sorted(
                os.path.realpath(entry.path) if entry.is_symlink() else entry.path
                for entry in entries
                if depth < _DEEPEST and not entry.name.startswith(".") and entry.is_dir()
            )
    except OSError as error:
        if depth:
            return []
        raise ResultsError(
            f"{folder}: cannot be read: {error.strerror}; ask its owner for access"
        ) from None
    return [run for path in inner for run in _below(path, depth + 1)]


def is_run(folder: str) -> bool:
    """Return True if ``folder`` is a run directory of hpcrun."""
    # If a run lost a file, the other files are still read.
    config, record, events, metrics, _ = (
        os.path.isfile(f"{folder}/{name}")  # noqa: PTH113
        for name in _FILES
    )
    return (config and record) or ((config or record) and (events or metrics))
