"""The config of a run: layers of values, resolved into a checked config or a line for each problem.

A later layer overrides an earlier layer. The files of a site and a profile are the lowest layers, below
config files and flags: see ``site.py``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from hpcrun.config.conflicts import contradictions, idle_keys
from hpcrun.config.fields import TYPED_GPUS, Section
from hpcrun.config.problems import (
    MASK,
    MOST_SHOWN,
    UNKNOWN,
    ConfigError,
    Problem,
    is_secret,
    key_of,
    unknown,
    value_text,
    words,
)
from hpcrun.config.reader import DEEPEST, TOO_DEEP, Layer, file_layer, read_yaml, refuse
from hpcrun.config.schema import Keys, kind_at, known_keys
from hpcrun.config.training import DataOptions, ModelOptions

COMMAND_LINE = "command line"
DEFAULTS = "defaults"
_LINE = re.compile(r"(?P<file>.*):(?P<line>\d+)")


class Config(Keys):
    """The whole configuration of a run; immutable.

    ``hpcrun.config.resolve`` makes it from files and reports every problem. The constructor raises
    ``pydantic.ValidationError`` for an unknown key or a wrong value.
    """

    @classmethod
    def from_file(cls, path: str | Path, *overrides: str) -> Config:
        """Read a YAML or JSON file, as ``hpcrun submit -c PATH`` does.

        Args:
            path: a file whose name ends in ``.yaml``, ``.yml`` or ``.json``.
            overrides: changes such as ``"train.lr=1e-3"``; a later override replaces an earlier one.

        Raises:
            ConfigError: the file cannot be read, or a key or a value is wrong. The text has a line for each
                problem.
        """
        return resolve([file_layer(path), override_layer(overrides)])

    @property
    def warn_signal(self) -> str:
        """Name of the signal that asks the ranks to stop, such as USR2; a task always gets USR2."""
        return self.job.warn_signal if self.command else "USR2"


def resolve(layers: Iterable[Layer]) -> Config:
    """Merge ``layers`` into a checked config; a later layer replaces values of an earlier layer.

    Raises:
        ConfigError: a key is unknown, a value is wrong, or keys contradict each other. The text has a line
            for each problem, in the order of the layers and of the lines in a file.
    """
    merged = merge(layers)
    try:
        config = Config.model_validate(merged.values)
    except ValidationError as error:
        known, errors = list(known_keys(Config)), error.errors()
        # The search for a similar key takes milliseconds for each key.
        given = [(_first_given([key_of(it)], merged.where), it) for it in errors]
        given.sort(key=_in_order(merged.where))
        shown = [(place, *words(it, known)) for place, it in given[:MOST_SHOWN]]
        more = len(given) - len(shown)
    else:
        found = list(contradictions(config))
        if not found:
            return config
        of_keys = [(_first_given(keys, merged.where), (keys[0], text)) for keys, text in found]
        of_keys.sort(key=_in_order(merged.where))
        shown, more = [(place, *one) for place, one in of_keys], 0
    raise ConfigError(
        [Problem(merged.where.get(key, DEFAULTS), *rest) for key, *rest in shown], more
    )


def _first_given(keys: Sequence[str], where: Mapping[str, str]) -> str:
    """Return the first given key, or else the section of one, for the place in a message; or ""."""
    exact = (key for key in keys if key in where)
    around = filter(None, (given_key(key, where) for key in keys))
    return next(exact, None) or next(around, "")


def _in_order(where: Mapping[str, str]) -> Callable[[tuple[str, object]], int]:
    order = {key: number for number, key in enumerate(where)}
    return lambda found: order.get(found[0], len(order))


def idle_lines(config: Config, layers: Iterable[Layer]) -> list[str]:
    """Return a line for each key of ``layers`` that another key makes ineffective in ``config``."""
    where = merge(layers).where
    return [str(Problem(where[key], key, text)) for key, text in idle_keys(config, where)]


def load_resolved(path: str | Path, content: bytes | None = None) -> Config:
    """Read a resolved config: the file ``path`` of a run directory.

    Args:
        content: the bytes of the file, if the caller has read it.

    Raises:
        ConfigError: the file cannot be read, or is not a valid config.
    """
    try:
        return resolve([file_layer(path, content=content)])
    except ConfigError as error:
        raise ConfigError(map(_of_another_version, error.problems), error.more) from None


def _of_another_version(problem: Problem) -> Problem:
    if not problem.text.startswith(UNKNOWN):
        return problem
    remedy = "if another version of hpcrun wrote the file, continue the run with that version"
    return replace(problem, text=f"{problem.text}; {remedy}")


def with_task_options(
    config: Config,
    options: tuple[type[BaseModel], type[BaseModel]],
    where: Callable[[str], str],
) -> Config:
    """Return ``config`` with the sections ``model`` and ``data`` checked and completed by a task's models.

    Args:
        config: a resolved config.
        options: the models of the two sections.
        where: the function of :func:`locate`.

    Raises:
        ConfigError: the problems of both sections.
    """
    sections: tuple[ModelOptions, DataOptions] = (config.model, config.data)
    problems: list[Problem] = []
    more = 0
    update: dict[str, Section] = {}
    for name, model, section in zip(("model", "data"), options, sections, strict=True):
        found, further, checked = _check(model, section.own, name, where)
        problems += found
        more += further
        # The keys of hpcrun come last: a task cannot give them another default.
        # All values are checked by now: a second check would build validators for it.
        update[name] = type(section).model_construct(
            **checked | section.model_dump(exclude=set(section.own))
        )
    if problems:
        raise ConfigError(sorted(problems, key=_line_order), more)
    return config.model_copy(update=update)


def _check(
    model: type[BaseModel],
    values: Mapping[str, object],
    prefix: str,
    where: Callable[[str], str],
) -> tuple[list[Problem], int, dict[str, Any]]:
    """Return the first problems, the number of further problems, and the checked values."""
    more = 0
    known = list(dict.fromkeys([*known_keys(model, prefix), *known_keys(Config)]))
    found: list[tuple[str, str]] = []
    checked: dict[str, Any] = {}
    if model.model_config.get("extra", "ignore") == "ignore":
        fields = model.model_fields.items()
        names = {name for field, info in fields for name in (field, getattr(info, "alias", field))}
        extra = [f"{prefix}.{key}" for key in values if key not in names]
        found += [(key, unknown(key, known)) for key in extra[:MOST_SHOWN]]
        more += max(0, len(extra) - MOST_SHOWN)
    try:
        checked = model.model_validate(dict(values)).model_dump(mode="json")
    except ValidationError as error:
        errors = error.errors()
        more += max(0, len(errors) - MOST_SHOWN)
        for details in errors[:MOST_SHOWN]:
            details["loc"] = (prefix, *details["loc"])
            found.append(words(details, known))
    return [Problem(where(key), key, text) for key, text in found], more, checked


def _line_order(problem: Problem) -> tuple[str, int]:
    match = _LINE.fullmatch(problem.place)
    return (match["file"], int(match["line"])) if match else (problem.place, 0)


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
            refuse(place, "remove the blanks around =", f"{key}={shown}")


def flag_layer(flags: Mapping[str, tuple[object, str]]) -> Layer:
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
    values: dict[str, object] = {}
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
    changed: dict[str, object] = {"gpus": int(found["count"])}
    where = dict(layer.where)
    if found["type"] is not None:
        if job.get("gpu_type") not in (None, found["type"]):
            refuse(place, f"{gpus} contradicts job.gpu_type={job['gpu_type']}", "job.gpus")
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
    values: dict[str, object],
    added: Mapping[str, object],
    where: dict[str, str],
    places: Mapping[str, str],
    path: tuple[str, ...],
) -> None:
    if len(path) > DEEPEST:
        refuse(places.get(".".join(path), DEFAULTS), TOO_DEEP, ".".join(path))
    for key, value in added.items():
        below = (*path, key)
        dotted = ".".join(below)
        kind = kind_at(below)
        if value is None and kind in ("section", "mapping", "list"):
            continue
        if isinstance(value, Mapping):
            inner = old = values.get(key)
            if not isinstance(inner, dict):
                if kind == "section" and key in values:
                    # Otherwise the section's flag replaces the value without a word.
                    shown = MASK if is_secret(dotted) else value_text(old)
                    refuse(
                        where.get(dotted, DEFAULTS),
                        f"should be keys and values, not {shown}",
                        dotted,
                    )
                values[key] = inner = {}
            _place(dotted, where, places)
            _merge(inner, value, where, places, below)
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


def _keys_in(value: Mapping[str, object] | list[object], key: str) -> Iterator[str]:
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


def _single(path: tuple[str, ...], value: object, place: str) -> Layer:
    values = {path[-1]: value}
    for key in reversed(path[:-1]):
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
        refuse(place, f"write an override as KEY=VALUE, such as {example}=1", shown)
    if len(path) > DEEPEST:
        refuse(place, TOO_DEEP, dotted)
    if not all(path):
        refuse(
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
