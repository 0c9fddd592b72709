"""Sources of config values: files, overrides and flags. A later layer overrides an earlier layer.

Every layer stores the place of each key, so that a late problem is still reported with the line to correct.

The files of a site and a profile are the lowest layers, below config files and flags: see ``site.py``.
"""

from __future__ import annotations

import difflib
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from hpcrun.config.fields import TYPED_GPUS
from hpcrun.config.problems import (
    MASK,
    ConfigError,
    Problem,
    is_secret,
    printable,
    value_text,
)
from hpcrun.config.reader import DEEPEST, TOO_DEEP, read_json, read_yaml
from hpcrun.config.shape import kind_at

COMMAND_LINE = "command line"
DEFAULTS = "defaults"
_SUFFIXES = (".yaml", ".yml", ".json")
_MOST_BYTES = 1 << 20  # a checkpoint given as config by mistake would take minutes to parse


@dataclass(frozen=True)
class Layer:
    """Values of a source: a file, the command line or a profile.

    Attributes:
        values: the values, nested by section.
        where: the place of each dotted key, such as ``gpt.yaml:12``.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    where: Mapping[str, str] = field(default_factory=dict)


def file_layer(path: str | Path, name: str | None = None, content: bytes | None = None) -> Layer:
    """Read the YAML or JSON file ``path``; an empty file is an empty layer.

    The suffix decides the format: ``.yaml``, ``.yml`` or ``.json``. The file has at most 1 MiB.
    ``name``: its name in messages, if not its path. ``content``: its bytes, if the caller has read it.

    Raises:
        ConfigError: the file cannot be read, has another format than its suffix says, gives a key twice, or
            contains anything but keys and values.
    """
    path = Path(path)
    shown = name or _shown(path)
    if path.suffix.lower() not in _SUFFIXES:
        _refuse(shown, f"the name of a config file must end in {', '.join(_SUFFIXES)}")
    text = _text(_read(path, shown) if content is None else content, shown)
    read = read_json if path.suffix.lower() == ".json" else read_yaml
    values, where = read(text, lambda line: f"{shown}:{line}")
    if values is None:
        values = {}
    if not isinstance(values, dict):
        _refuse(f"{shown}:1", "a config should be keys and values, such as `seed: 1`")
    return Layer(values, where)


def override_layer(overrides: Sequence[str], place: str = COMMAND_LINE) -> Layer:
    """Read ``overrides`` from a command line: `train.lr=3e-4`, `job.env.DEBUG=1`.

    A value is read as YAML. If the schema expects text, the value is taken literally, so that only the
    shell's quotes count; `null` then means no value. ``place``: where a message says that they are.

    Raises:
        ConfigError: an override has no `=` or no key, or its value is not valid YAML.
    """
    layers: list[Layer] = []
    problems: list[Problem] = []
    _refuse_blanks(overrides, place)
    for override in overrides:
        try:
            layers.append(_override(override, place))
        except ConfigError as error:
            problems.extend(error.problems)
    if problems:
        raise ConfigError(problems)
    return merge(layers)


def _refuse_blanks(words: Sequence[str], place: str) -> None:
    """Refuse an override that blanks around its equals sign have made into several words."""
    for at, word in enumerate(words):
        key, equals, value = word.partition("=")
        before = words[at - 1] if at and "=" not in words[at - 1] else ""
        after = words[at + 1] if at + 1 < len(words) and "=" not in words[at + 1] else ""
        if not equals or (key and value):
            continue
        key, value = key or before, value or after
        if (word.startswith("=") and before and value) or (word.endswith("=") and key and after):
            shown = "VALUE" if is_secret(key) else value
            _refuse(place, "remove the blanks around =", f"{key}={shown}")


def flag_layer(flags: Mapping[str, tuple[Any, str]]) -> Layer:
    """Return the layer of command-line flags.

    Args:
        flags: for each dotted key its value, and the flag's name as the place: ``("4", "--gpus")``.

    Raises:
        ConfigError: a value contradicts another value.
    """
    return merge(_single(tuple(key.split(".")), *given) for key, given in flags.items())


def merge(layers: Iterable[Layer]) -> Layer:
    """Merge layers section by section; a later value replaces an earlier value.

    A section, mapping or list without content (null) changes nothing, because it remains when all lines
    below a heading are commented out. The places are in the order of the layers.
    """
    values: dict[str, Any] = {}
    where: dict[str, str] = {}
    for layer in map(_with_gpu_type, layers):
        _merge(values, layer.values, where, layer.where, ())
    return Layer(values, where)


def _with_gpu_type(layer: Layer) -> Layer:
    """Split ``job.gpus: a100:4`` into the count and ``job.gpu_type``, so that layers merge by key."""
    job = layer.values.get("job")
    gpus = job.get("gpus") if isinstance(job, Mapping) else None
    found = TYPED_GPUS.fullmatch(gpus) if isinstance(gpus, str) else None
    if found is None or not isinstance(job, Mapping):
        return layer
    place = layer.where.get("job.gpus", DEFAULTS)
    changed: dict[str, Any] = {"gpus": int(found["count"])}
    where = dict(layer.where)
    if found["type"] is not None:
        if job.get("gpu_type") not in (None, found["type"]):
            _refuse(place, f"{gpus} contradicts job.gpu_type={job['gpu_type']}", "job.gpus")
        changed["gpu_type"] = found["type"]
        where["job.gpu_type"] = place
    return Layer({**layer.values, "job": {**job, **changed}}, where)


def locate(layers: Iterable[Layer]) -> Callable[[str], str]:
    """Return a function from a dotted key to the place of its final value in ``layers``.

    Raises:
        ConfigError: values of a layer contradict each other.
    """
    where = merge(layers).where
    return lambda key: where.get(given_key(key, where), DEFAULTS)


def given_key(key: str, where: Mapping[str, str]) -> str:
    """Return the given key that sets `key`, or "" if there is none.

    This is `key`, or a given key below it, or the nearest given key above it.
    """
    if key in where:
        return key
    below = next((given for given in where if given.startswith(f"{key}.")), "")
    while not below and key:
        key = key.rpartition(".")[0]
        below = key if key in where else ""
    return below


def _merge(
    values: dict[str, Any],
    added: Mapping[str, Any],
    where: dict[str, str],
    places: Mapping[str, str],
    path: tuple[str, ...],
) -> None:
    if len(path) > DEEPEST:
        _refuse(places.get(".".join(path), DEFAULTS), TOO_DEEP, ".".join(path))
    for key, value in added.items():
        below = (*path, key)
        dotted = ".".join(below)
        kind = kind_at(below)
        if value is None and kind in ("section", "mapping", "list"):
            continue
        if isinstance(value, Mapping):
            if not isinstance(old := values.get(key), dict):
                if kind == "section" and key in values:
                    # Otherwise the section's flag replaces the value without a word.
                    shown = MASK if is_secret(dotted) else value_text(old)
                    _refuse(
                        where.get(dotted, DEFAULTS),
                        f"should be keys and values, not {shown}",
                        dotted,
                    )
                values[key] = {}
            _place(dotted, where, places)
            _merge(values[key], value, where, places, below)
            continue
        # Only for these: the search of all keys for each key would take minutes for thousands of keys.
        if isinstance(values.get(key), dict | list):
            for gone in [given for given in where if given.startswith(f"{dotted}.")]:
                del where[gone]
        values[key] = value
        _place(dotted, where, places)
        if isinstance(value, list):
            for given in _keys_in(value, dotted):
                _place(given, where, places)


def _keys_in(value: Any, key: str) -> Iterator[str]:
    """Yield the dotted key of each value in a list or mapping with this key."""
    items = enumerate(value) if isinstance(value, list) else value.items()
    for step, item in items:
        below = f"{key}.{step}"
        yield below
        if isinstance(item, list | dict):
            yield from _keys_in(item, below)


def _place(key: str, where: dict[str, str], places: Mapping[str, str]) -> None:
    if key in places:
        where.pop(key, None)  # keeps `where` in the order of the final values
        where[key] = places[key]


def _single(path: tuple[str, ...], value: Any, place: str) -> Layer:
    values = value
    for key in reversed(path):
        values = {key: values}
    return Layer(values, {".".join(path): place})


def _override(override: str, place: str) -> Layer:
    key, equals, text = override.partition("=")
    path = tuple(part.strip() for part in key.split("."))
    dotted = ".".join(path)
    if not equals:
        example = "job.env.NAME" if is_secret(dotted) else dotted or "seed"
        # Without =, the key may have the value in it.
        shown = "job.env" if dotted.startswith("job.env.") else key
        _refuse(place, f"write an override as KEY=VALUE, such as {example}=1", shown)
    if len(path) > DEEPEST:
        _refuse(place, TOO_DEEP, dotted)
    if not all(path):
        _refuse(
            place,
            "has no key before =; write KEY=VALUE, such as seed=1",
            f"{key}=" if key else override,
        )
    if kind_at(path) == "text":
        return _single(path, None if text == "null" else text, place)
    try:
        value, where = read_yaml(text, lambda _: place, path)
    except ConfigError as error:
        raise ConfigError(
            Problem(problem.place, problem.key or dotted, problem.text)
            for problem in error.problems
        ) from None
    if isinstance(value, str) and text.strip()[:1] not in tuple("'\"|>&*!"):
        value = text.strip()  # on a command line, ` #` is part of a path, not a comment
    if not text.strip():
        value = ""  # an empty value is not null: null must be explicit
    return Layer(_single(path, value, place).values, where | {dotted: place})


def _read(path: Path, shown: str) -> bytes:
    try:
        # Otherwise the open of a FIFO waits for its writer.
        with open(
            path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)
        ) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                _refuse(shown, "is a pipe or a device, not a file; give a YAML or JSON file")
            return file.read(_MOST_BYTES + 1)
    except FileNotFoundError:
        _refuse(shown, f"no such file{_nearest_file(path)}")
    except IsADirectoryError:
        _refuse(shown, "is a directory; give a YAML or JSON file in it")
    except OSError as error:
        _refuse(shown, f"cannot be read: {error.strerror}")


def _text(data: bytes, shown: str) -> str:
    if len(data) > _MOST_BYTES:
        _refuse(shown, f"is larger than {_MOST_BYTES >> 20} MiB, too large for a config")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        byte = data[error.start]
        _refuse(f"{shown}:{line}", f"byte {byte:#04x} is not UTF-8; save the file as UTF-8")


def _nearest_file(path: Path) -> str:
    try:
        names = [entry.name for entry in path.parent.iterdir() if entry.suffix in _SUFFIXES]
    except OSError:
        return ""
    near = difflib.get_close_matches(path.name, names, n=1)
    return f"; did you mean {_shown(path.parent / near[0])}?" if near else ""


def _shown(path: Path) -> str:
    return printable(str(path).encode("utf-8", "backslashreplace").decode())


def _refuse(place: str, text: str, key: str = "") -> NoReturn:
    raise ConfigError([Problem(place, key, text)])
