"""The folder of a sweep on disk: all its run directories appear together, or none.

A single run directory is fsynced file by file. For a thousand of them that takes half a minute. Here all
files are written first, then one syncfs(2) makes them durable, and then they become visible.
"""

import contextlib
import ctypes
import math
import os
import random
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcrun.api.sweeps.configs import range_of
from hpcrun.api.sweeps.handle import Condition, Row, RowBlock, SweepRequest, plain, refusal
from hpcrun.config import file_layer
from hpcrun.drafts import draft_folder
from hpcrun.errors import UserError
from hpcrun.run import directory
from hpcrun.run.directory import RunDirectory, RunError
from hpcrun.run.files import hashed_json, sync_directory, with_comment_crc

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class NewRun:
    """A run directory to make: its name, the text of its config, and its batch script if it has one.

    ``record``: the fields of its ``run.json`` that other runs lack.
    """

    name: str
    config: str
    script: str | None = None
    record: Mapping[str, Any] = field(default_factory=dict)


@contextmanager
def made_folder(folder: Path) -> Iterator[None]:
    """Make the folder of a sweep if it is missing; if the block fails and the folder is empty, remove it.

    Raises:
        RunError: something else has the name, or the folder cannot be made.
    """
    run = RunDirectory(folder)
    if run.exists():
        raise RunError(f"{folder}: is a single run; choose another --name for the sweep")
    missing = [path for path in (folder, *folder.parents) if not os.path.lexists(path)]
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(
            f"{folder}: cannot be made: {error.strerror}; choose a writable place with --runs-dir"
        ) from error
    directory.refuse_if_writable_by_others(run)
    try:
        yield
    except BaseException:
        directory.remove_if_empty(missing)
        raise


@contextmanager
def new_runs(
    folder: Path, runs: Iterable[NewRun], record: Mapping[str, Any], diff: str
) -> Iterator[None]:
    """Make run directories in ``folder``, visible together; remove them if the block fails.

    Args:
        record: the content of each ``run.json``.
        diff: the uncommitted changes; each run has a link to one file in ``folder``.

    Raises:
        OSError: the disk refuses; no run directory remains.
    """
    runs, published = list(runs), list[Path]()
    content = hashed_json(dict(record))
    try:
        with draft_folder(folder / "sweep", mode=0o700) as staged:
            patch = _write_diff(folder, diff) if runs and diff else None
            for run in runs:
                own = hashed_json({**record, **run.record}) if run.record else content
                _fill(RunDirectory(staged / run.name), run, own, patch)
            sync_file_system(folder)
            for run in runs:
                (staged / run.name).rename(folder / run.name)
                published.append(folder / run.name)
        sync_directory(folder)
        yield
    except BaseException:
        for path in published:
            shutil.rmtree(path, ignore_errors=True)
        raise


def _write_diff(folder: Path, diff: str) -> str:
    """Write the uncommitted changes once for all runs; return the link to them from a run directory."""
    number = 1
    while (path := folder / f"uncommitted-{number:03d}.patch").exists():
        number += 1
    path.write_text(diff, errors="surrogateescape")
    return f"../{path.name}"


def _fill(run: RunDirectory, new: NewRun, record: bytes, patch: str | None) -> None:
    for path in (run.path, run.checkpoints, run.logs):
        path.mkdir(mode=0o700)
    _write(run.config, with_comment_crc(new.config).encode())
    _write(run.record, record)
    if new.script is not None:
        _write(run.batch_script, new.script.encode())
    if patch is not None:
        run.diff.symlink_to(patch)


def _write(path: Path, content: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "wb") as stream:  # noqa: PTH123  (a descriptor, so that the mode holds)
        stream.write(content)


def sync_file_system(folder: Path) -> None:
    """Make all writes to the file system of ``folder`` durable (syncfs(2)).

    Raises:
        OSError: the disk refuses.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if _libc.syncfs(descriptor) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(folder))
    finally:
        with contextlib.suppress(OSError):
            os.close(descriptor)


_PARTS = ("grid", "zip", "list", "random", "where")
_DIGITS = 6
_MOST_DRAWS = 100_000
Place = Callable[[str], str]
"""Returns file and line of a dotted key of the sweep file."""


def read_sweep_file(path: Path) -> SweepRequest:
    """Return the sweep that the YAML or JSON file describes.

    Raises:
        ConfigError: the file cannot be read, or a part of it is wrong; the place names file and line.
    """
    layer = file_layer(path)

    def place(key: str) -> str:
        while key and key not in layer.where:
            key = key.rpartition(".")[0]
        return layer.where.get(key, str(path))

    for part in layer.values:
        if part not in _PARTS:
            raise refusal(place(part), part, f"unknown; a sweep file has {', '.join(_PARTS)}")
    blocks: list[RowBlock] = []
    for part in ("grid", "zip", "list", "random"):
        content = layer.values.get(part)
        if content:
            blocks += _READERS[part](content, part, place)
    if not blocks:
        raise refusal(str(path), "", "has no values; write `grid:` with keys and lists of values")
    return SweepRequest(blocks, _conditions(layer.values.get("where"), place("where")))


def _conditions(content: Any, place: str) -> list[Condition]:
    lines = [content] if isinstance(content, str) else content or []
    if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
        raise refusal(place, "where", "should be a list of expressions such as train.lr < 1e-3")
    return [Condition(line, place) for line in lines]


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested sections as dotted keys; a random draw or a range, which are mappings, stays whole."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        dotted = f"{prefix}{key}"
        if isinstance(value, dict) and not set(value) & _KINDS:
            found |= flat(value, f"{dotted}.")
        else:
            found[dotted] = value
    return found


def _section(content: Any, part: str, place: str) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise refusal(place, part, "should be keys with their values, such as seed: [0, 1, 2]")
    return flat(content)


def _listed(key: str, values: Any, place: str) -> list[Any]:
    if isinstance(values, dict) and set(values) == {"range"}:
        parts = values["range"]
        if not isinstance(parts, list) or len(parts) not in (2, 3) or not _whole(parts):
            raise refusal(place, key, "range should be [first, end] or [first, end, step]")
        values = list(range_of(key, str(parts), parts))
    if not isinstance(values, list) or not values:
        raise refusal(place, key, "should be a list of values, or {range: [first, end]}")
    return values


def _whole(parts: Sequence[Any]) -> bool:
    return all(isinstance(part, int) and not isinstance(part, bool) for part in parts)


def _grid(content: Any, part: str, place: Place) -> list[RowBlock]:
    blocks = []
    for key, values in _section(content, part, place(part)).items():
        line = place(f"{part}.{key}")
        blocks.append(RowBlock([{key: plain(value)} for value in _listed(key, values, line)], line))
    return blocks


def _zip(content: Any, part: str, place: Place) -> list[RowBlock]:
    axes = {
        key: _listed(key, values, place(f"{part}.{key}"))
        for key, values in _section(content, part, place(part)).items()
    }
    counts = {key: len(values) for key, values in axes.items()}
    if len(set(counts.values())) > 1:
        told = ", ".join(f"{key} has {count}" for key, count in counts.items())
        raise refusal(place(part), part, f"all keys need the same number of values: {told}")
    rows = [
        {key: plain(value) for key, value in zip(axes, values, strict=True)}
        for values in zip(*axes.values(), strict=True)
    ]
    return [RowBlock(rows, place(part))]


def _list(content: Any, part: str, place: Place) -> list[RowBlock]:
    if not isinstance(content, list) or not all(isinstance(row, dict) and row for row in content):
        raise refusal(
            place(part), part, "should be a list of runs such as {train.lr: 1e-4, seed: 0}"
        )
    rows: list[Row] = [{key: plain(value) for key, value in flat(row).items()} for row in content]
    for number, row in enumerate(rows):
        if row.keys() != rows[0].keys():
            missing = ", ".join(sorted(row.keys() ^ rows[0].keys()))
            told = f"run {number + 1} and run 1 differ in their keys: {missing}"
            raise refusal(place(f"{part}.{number}"), part, told)
    return [RowBlock(rows, place(part))]


def _random(content: Any, part: str, place: Place) -> list[RowBlock]:
    axes = _section(content, part, place(part))
    seed, count = axes.pop("seed", None), axes.pop("count", None)
    if not _whole([seed, count]) or not 1 <= count <= _MOST_DRAWS:
        raise refusal(place(part), part, "needs whole numbers `seed:` and `count:`")
    draws = {key: _draw(key, one, place(f"{part}.{key}")) for key, one in axes.items()}
    if not draws:
        raise refusal(
            place(part), part, "has no keys; write one such as lr: {log_uniform: [1e-5, 1]}"
        )
    source = random.Random(seed)
    # Draw row by row, so that a larger count only adds rows.
    return [
        RowBlock(
            [{key: plain(draw(source)) for key, draw in draws.items()} for _ in range(count)],
            place(part),
        )
    ]


Draw = Callable[[random.Random], Any]


def _draw(key: str, content: Any, place: str) -> Draw:
    if not isinstance(content, dict) or len(content) != 1 or not set(content) <= _DRAWS:
        names = ", ".join(sorted(_DRAWS))
        raise refusal(place, key, f"should be one of {names}, such as {{uniform: [0, 1]}}")
    ((kind, values),) = content.items()
    if not isinstance(values, list) or not values:
        raise refusal(place, key, f"{kind} needs a list")
    if kind == "choice":
        return lambda source: source.choice(values)
    if len(values) != 2 or not _in_order(values):
        raise refusal(place, key, f"{kind} needs [low, high] with low < high")
    low, high = values
    if kind == "integer":
        if not _whole(values):
            raise refusal(place, key, "integer needs whole numbers; both ends are possible")
        return lambda source: source.randint(low, high)
    if kind == "uniform":
        return lambda source: _rounded(source.uniform(low, high))
    if low <= 0:
        raise refusal(place, key, "log_uniform needs numbers above 0")
    return lambda source: _rounded(math.exp(source.uniform(math.log(low), math.log(high))))


def _in_order(values: Sequence[Any]) -> bool:
    numbers = all(isinstance(one, int | float) and not isinstance(one, bool) for one in values)
    return numbers and all(map(math.isfinite, values)) and values[0] < values[1]


def _rounded(number: float) -> float:
    """Return the number with the digits that a person reads in a table."""
    return float(f"{number:.{_DIGITS}g}")


_DRAWS = {"choice", "uniform", "log_uniform", "integer"}
_KINDS = _DRAWS | {"range"}
_READERS: dict[str, Callable[[Any, str, Place], list[RowBlock]]] = {
    "grid": _grid,
    "zip": _zip,
    "list": _list,
    "random": _random,
}


_PLACE = "sweep="


def sweep_request(
    axes: Mapping[str, Iterable[Any]] | None, file: str | os.PathLike[str] | None
) -> SweepRequest:
    """Return the product of the sweep in ``file`` and of ``axes``: values by dotted key.

    Raises:
        UserError: an axis has no values, or the file is wrong.
    """
    request = read_sweep_file(Path(file)) if file is not None else SweepRequest()
    if axes is not None and not isinstance(axes, Mapping):
        raise UserError(f"{_PLACE}: give a dict, such as {_PLACE}{{'seed': range(3)}}")
    blocks = [*request.blocks, *(_block(key, values) for key, values in (axes or {}).items())]
    if not blocks:
        raise UserError(f"{_PLACE}: has no key; give values, such as {_PLACE}{{'seed': range(3)}}")
    return SweepRequest(blocks, request.conditions)


def _block(key: object, values: object) -> RowBlock:
    if not isinstance(key, str) or not all(part.strip() for part in key.split(".")):
        raise UserError(f"{_PLACE}: {key!r} is not a key; write it as 'section.key'")
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise UserError(f"{_PLACE}: {key}: give a list of values, such as [1e-4, 3e-4]")
    found = [_plain(key, value) for value in values]
    if not found:
        raise UserError(f"{_PLACE}: {key}: has no values; give at least one")
    return RowBlock([{key: plain(value)} for value in found], _PLACE)


def _plain(key: str, value: Any) -> Any:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    # A number of numpy.
    known = value.item() if hasattr(value, "item") else value
    if isinstance(known, list | tuple):
        return [_plain(key, part) for part in known]
    if isinstance(known, float):
        return _without_noise(known)
    if known is None or isinstance(known, str | int | bool):
        return known
    raise UserError(f"{_PLACE}: {key}: {value!r} is not a value of a config; give text or a number")


def _without_noise(number: float) -> float:
    """Remove the rounding error of a computed value: return 0.02 for 0.020000000000000004."""
    near = float(f"{number:.15g}")
    # A number such as 1/3 needs all its digits, and stays unchanged.
    return near if len(repr(near)) < len(repr(number)) - 3 else number
