"""The config of each element of a sweep, checked, and its text.

A sweep may have a thousand elements, and a whole resolution takes milliseconds. Only the sections that
the sweep changes are checked and written again for each element.
"""

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpcrun.api.submission.choose_config import SubmitRequest, config_layers, with_task
from hpcrun.api.sweeps.handle import (
    Row,
    RowBlock,
    SweepRequest,
    SweepValue,
    canonical,
    refusal,
    text_of,
)
from hpcrun.config import Config, ConfigError, Layer, Problem, flag_layer, override_layer, resolve
from hpcrun.config.fields import Section
from hpcrun.config.layers import merge
from hpcrun.config.resolve import contradictions
from hpcrun.config.shape import idle_keys, kind_at, known_keys
from hpcrun.config.writer import section_text, yaml_parts
from hpcrun.errors import UserError

# They decide where and how a run is kept, for all elements.
_NOT_SWEPT = ("name", "command", "job.executor", "job.cluster", "watch.notify")
# What hpcrun does for a command.
_OF_ALL_RUNS = ("job", "restarts")
_TASK = frozenset({"task", "model", "data"})
"""The sections with options that depend on the task."""


@dataclass(frozen=True)
class Element:
    """An element of the sweep: its values by dotted key, its config, and the text of the config.

    ``template``: the command with its placeholders; empty without a placeholder.
    """

    values: dict[str, Any]
    config: Config
    text: str
    template: Sequence[str] = ()


def element_configs(
    request: SubmitRequest, sweep: SweepRequest, rows: Sequence[Row]
) -> list[Element]:
    """Return the elements of ``rows``, in their order.

    Raises:
        UserError: a key is unknown, has no effect, or may not differ between elements; a value is wrong; or
        two elements are equal.
    """
    keys = list(rows[0])
    if "task" in keys and request.file is None:
        raise refusal(
            sweep.place_of("task"), "task", "needs a config for all tasks; give it with -c"
        )
    layers = config_layers(request)
    places = {key: sweep.place_of(key) for key in keys}
    _refuse_fixed(keys, places, layers)
    placeholders = keys_of(names_in(request.command), keys)
    if request.command:
        _refuse_unused(keys, places, placeholders)
    made = _Maker(layers, request.command, placeholders, places)
    elements = [made.element(row) for row in rows]
    _refuse_equal(elements, places)
    return elements


class _Maker:
    """Makes the config of one row after the other; remembers the sections that rows share."""

    def __init__(
        self,
        layers: Sequence[Layer],
        command: Sequence[str],
        placeholders: dict[str, str],
        places: dict[str, str],
    ) -> None:
        self._layers, self._command = [*layers], [*command]
        self._placeholders, self._places = placeholders, places
        self._known = set(known_keys(Config))
        self._sections: dict[tuple[str, str], Any] = {}
        self._texts: dict[tuple[str, str], str] = {}
        self._parts: dict[str, dict[str, str]] = {}
        self._base: Config | None = None
        self._base_text: dict[str, str] = {}

    def element(self, row: Row) -> Element:
        """Return the element of ``row``; raises UserError as :func:`element_configs` does."""
        values = {key: given.value for key, given in row.items()}
        if self._base is None:
            self._base = self._resolved(row)
            self._base_text = yaml_parts(self._base.model_dump())
        update = {name: self._section(name, row) for name in self._touched(row)}
        config = self._base.model_copy(update=update)
        if next(contradictions(config), None) or self._idle(config, values):
            # The full resolution raises the error with its message.
            self._resolved(row)
        texts = {name: self._text(name, config, row) for name in update}
        template = self._command if self._placeholders else ()
        return Element(values, config, "".join((self._base_text | texts).values()), template)

    def _idle(self, config: Config, values: dict[str, Any]) -> bool:
        return next(idle_keys(config, values), None) is not None

    def _touched(self, row: Row) -> list[str]:
        """Return the sections that the row changes; the sections of a task are checked together."""
        found = {key.partition(".")[0] for key in row if self._in_config(key)}
        if found & _TASK:
            found |= _TASK
        if self._placeholders:
            found.add("command")
        return [name for name in Config.model_fields if name in found]

    def _in_config(self, key: str) -> bool:
        return not self._command or key.partition(".")[0] in self._known

    def _mark(self, name: str, row: Row) -> tuple[str, str]:
        """Return a key for the cache: equal for rows with the same values in the section."""
        if name == "command":
            return name, repr([given.text for given in row.values()])
        group = _TASK if name in _TASK else {name}
        mine = {k: given.value for k, given in row.items() if k.partition(".")[0] in group}
        return name, canonical(mine)

    def _section(self, name: str, row: Row) -> Any:
        mark = self._mark(name, row)
        if mark not in self._sections:
            self._sections[mark] = self._checked(name, row)
        return self._sections[mark]

    def _checked(self, name: str, row: Row) -> Any:
        """Return one section for ``row``, checked only by the schema of that section if that suffices."""
        assert self._base is not None
        section = getattr(self._base, name)
        if name == "command":
            return filled(self._command, row, self._placeholders)
        keys = [key for key in row if key.partition(".")[0] == name]
        if keys == [name] and name not in _TASK:
            return self._scalar(name, row)
        if name in _TASK or any(key.count(".") != 1 for key in keys):
            return getattr(self._resolved(row), name)
        given = {key.partition(".")[2]: row[key].value for key in keys}
        try:
            return type(section).model_validate(section.model_dump() | given)
        except ValueError:
            return getattr(self._resolved(row), name)

    def _scalar(self, name: str, row: Row) -> Any:
        try:
            return getattr(Config.model_validate({name: row[name].value}), name)
        except ValueError:
            return getattr(self._resolved(row), name)

    def _text(self, name: str, config: Config, row: Row) -> str:
        mark = self._mark(name, row)
        if mark not in self._texts:
            self._texts[mark] = self._written(name, getattr(config, name))
        return self._texts[mark]

    def _written(self, name: str, section: Any) -> str:
        """Return the text of a section; only the keys that differ from the first row's are written again."""
        if not isinstance(section, Section):
            return yaml_parts({name: section})[name]
        before = getattr(self._base, name).model_dump()
        values = section.model_dump()
        if not values:
            return yaml_parts({name: values})[name]
        if name not in self._parts:
            self._parts[name] = yaml_parts(before)
        new = {
            key: value for key, value in values.items() if key not in before or value != before[key]
        }
        old = {key: self._parts[name][key] for key in values if key not in new}
        parts = old | yaml_parts(new)
        return section_text(name, {key: parts[key] for key in values})

    def _resolved(self, row: Row) -> Config:
        """Return the whole config of ``row``, resolved like that of a single run.

        Raises:
            UserError: with a line for each problem.
        """
        given = {
            key: (value.value, self._places[key])
            for key, value in row.items()
            if self._in_config(key)
        }
        layers = [*self._layers, flag_layer(given)]
        if self._placeholders:
            words = filled(self._command, row, self._placeholders)
            layers.append(flag_layer({"command": (words, "after --")}))
        config = resolve(layers)
        for idle in idle_keys(config, given):
            raise refusal(
                self._places[idle.key], idle.key, f"{idle.text}, or exclude it by `where`"
            )
        return with_task(config, layers)


def _refuse_fixed(keys: Sequence[str], places: dict[str, str], layers: Sequence[Layer]) -> None:
    for key in keys:
        if key in _NOT_SWEPT:
            raise refusal(places[key], key, "is the same for all runs of a sweep; give it once")
        if key == "job.env" or key.startswith("job.env."):
            what = "is masked in all tables; write `env NAME={value}` before the command, and sweep value"
            raise refusal(places[key], key, what)
        if kind_at(key.split(".")) == "section":
            raise refusal(places[key], key, "is a section; name a key of it, such as train.lr")
    given = merge(layers).where
    for key in keys:
        if given.get(key) == "command line" or given.get(key, "").startswith("--"):
            raise refusal(places[key], key, "is also given for all runs; remove one of the two")


def _refuse_unused(
    keys: Sequence[str], places: dict[str, str], placeholders: dict[str, str]
) -> None:
    for key in keys:
        section = key.partition(".")[0]
        if key in placeholders.values() or section in _OF_ALL_RUNS:
            continue
        last = key.rpartition(".")[2]
        raise refusal(
            places[key], key, f"has no effect: the command does not use it; write {{{last}}} in it"
        )


def _refuse_equal(elements: Sequence[Element], places: dict[str, str]) -> None:
    seen: dict[str, Element] = {}
    for element in elements:
        same = seen.setdefault(element.text, element)
        if same is not element:
            differing = [k for k in element.values if element.values[k] != same.values[k]]
            key = differing[0] if differing else next(iter(element.values))
            told = f"{text_of(same.values[key])} and {text_of(element.values[key])}"
            raise refusal(places[key], key, f"{told} give the same run; remove one of the two")


# ``{{x}}`` is the text ``{x}``, as in a format of Python.
_PLACE = re.compile(r"\{\{|\}\}|\{([A-Za-z_][\w.-]*)\}")


def names_in(command: Sequence[str]) -> list[str]:
    """Return the placeholders of ``command``, each once."""
    found = (match[1] for word in command for match in _PLACE.finditer(word))
    return list(dict.fromkeys(name for name in found if name))


def keys_of(names: Iterable[str], keys: Sequence[str]) -> dict[str, str]:
    """Return the key of each placeholder: the full key, or the only one with that last component.

    Raises:
        UserError: a placeholder has no key, or two.
    """
    return {name: _key_of(name, keys) for name in names}


def filled(command: Sequence[str], row: Row, keys: Mapping[str, str]) -> list[str]:
    """Return ``command`` with the values of ``row``, as the user wrote them."""

    def value(match: "re.Match[str]") -> str:
        return row[keys[match[1]]].text if match[1] else match[0][0]

    return [_PLACE.sub(value, word) for word in command]


def _key_of(name: str, keys: Sequence[str]) -> str:
    if name in keys:
        return name
    same = [key for key in keys if key.rpartition(".")[2] == name]
    if len(same) == 1:
        return same[0]
    if same:
        raise UserError(
            f"after --: {{{name}}} may be {' or '.join(same)}; write the whole key: {{{same[0]}}}"
        )
    known = [*keys, *(key.rpartition(".")[2] for key in keys)]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {{{near[0]}}}?" if near else f"the sweep has {', '.join(keys)};"
    raise UserError(
        f"after --: {{{name}}} is not a key of the sweep; {hint} for plain braces write {{{{{name}}}}}"
    )


OPTION = "--sweep"
_RANGE = re.compile(r"(-?\d+):(-?\d+)(?::(-?\d+))?")
_MOST = 100_000
_OPENING, _CLOSING = "[{(", "]})"


def read_axes(options: Sequence[str]) -> list[RowBlock]:
    """Return a block for each ``KEY=VALUES``.

    ``VALUES`` are values separated by commas, or ranges of whole numbers ``first:end`` or ``first:end:step``;
    the end is excluded.

    Raises:
        ConfigError: an option is not KEY=VALUES, or a key is given twice.
    """
    blocks = [_read_axis(option) for option in options]
    keys = [block.keys[0] for block in blocks]
    for key in keys:
        if keys.count(key) > 1:
            raise refusal(OPTION, key, "is given twice; write all its values in one --sweep")
    return blocks


def _read_axis(option: str) -> RowBlock:
    key, equals, text = option.partition("=")
    key = key.strip()
    if not equals or not key:
        raise refusal(OPTION, option, "write an axis as KEY=VALUES, such as train.lr=1e-4,3e-4")
    if not text.strip():
        raise refusal(OPTION, key, "has no values; write them with commas: 1e-4,3e-4")
    rows: list[Row] = [{key: value} for word in _split(text) for value in _values(key, word)]
    if not rows:
        raise refusal(
            OPTION, key, f"{text} is an empty range; the end is excluded: 0:3 means 0, 1, 2"
        )
    return RowBlock(rows, OPTION)


def _split(text: str) -> Iterator[str]:
    """Split at the commas outside brackets and quotes."""
    depth, quote, word = 0, "", ""
    for letter in text:
        if letter == "," and not depth and not quote:
            yield word
            word = ""
            continue
        word += letter
        if quote or letter in "'\"":
            quote = "" if letter == quote else quote or letter
        else:
            depth += (letter in _OPENING) - (letter in _CLOSING)
    yield word


def _values(key: str, word: str) -> Iterator[SweepValue]:
    span = _RANGE.fullmatch(word.strip())
    if span is None or kind_at(key.split(".")) == "text":
        yield SweepValue(read_value(key, word), word)
        return
    numbers = range_of(key, word, [int(part) for part in span.groups() if part is not None])
    yield from (SweepValue(number, str(number)) for number in numbers)


def range_of(key: str, shown: str, parts: Sequence[int]) -> range:
    """Return the range of ``first, end[, step]``.

    Raises:
        ConfigError: the step is 0, or the range has too many numbers.
    """
    if len(parts) == 3 and parts[2] == 0:
        raise refusal(OPTION, key, f"{shown} has step 0; use another step")
    numbers = range(*parts)
    if len(numbers) > _MOST:
        raise refusal(OPTION, key, f"{shown} has more than {_MOST} numbers; use a shorter range")
    return numbers


def read_value(key: str, word: str) -> Any:
    """Read ``word`` as the value of an override ``key=word``.

    Raises:
        ConfigError: the word is not valid YAML, or the key is unknown.
    """
    try:
        value: Any = override_layer([f"{key}={word}"]).values
    except ConfigError as error:
        raise ConfigError([Problem(OPTION, it.key, it.text) for it in error.problems]) from None
    for part in key.split("."):
        value = value[part.strip()]
    return value
