"""The rules of a site's file about keys and values of a config, and their comparison with a config.

A rule compares checked values, not text: ``7-8`` nodes have the count 8, and ``65536M`` is ``64G``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from pydantic import ValidationError

from hpcrun.config.config import Config
from hpcrun.config.fields import node_limits
from hpcrun.config.problems import ConfigError, Problem, unknown, words
from hpcrun.config.reader import Layer
from hpcrun.config.schema import kind_at, known_keys

SECTIONS = ("forbid", "require")
"""The sections of a site's file with rules."""
EXECUTOR = "job.executor"
_KIB = {"K": 1, "M": 2**10, "G": 2**20, "T": 2**30}
# sbatch(1): the operators of --constraint, and the separator of the names in other options.
_OPERATORS = {"job.constraint": r"[,&|()\[\]]|\*\d+"}


@dataclass(frozen=True)
class Values:
    """The values of a rule.

    Attributes:
        shown: the values as the administrator wrote them.
        exact: the values in the comparable form of :func:`_forms`.
        patterns: the values with ``*``, ``?`` or ``[``, as in file names.
    """

    shown: Sequence[str]
    exact: frozenset[str]
    patterns: Sequence[str]

    def has(self, comparable: str, shown: str) -> bool:
        """Return True if a value of a config, in both forms of :func:`_forms`, is one of these values."""
        return comparable in self.exact or any(fnmatchcase(shown, one) for one in self.patterns)


@dataclass(frozen=True)
class Rule:
    """A rule of the site for a key of the config.

    Attributes:
        required: True for ``require``, False for ``forbid``.
        key: the dotted key.
        values: the values that the rule forbids, or that are the only ones allowed; None: the rule is about
            the key itself.
        place: the line of the rule.
        message: the administrator's words for the user; may be empty.
    """

    required: bool
    key: str
    values: Values | None
    place: str
    message: str

    def problem(self, value: object, plain: object, where: Callable[[str], str]) -> Problem | None:
        """Return the problem of a config with ``value``; None if the rule allows the value.

        Args:
            plain: the value without the user's files and flags.
            where: the function of :func:`hpcrun.config.locate`.
        """
        shown = self.values.shown if self.values else []
        if self.required:
            wanted = f"should be {' or '.join(shown)}" if shown else "is required"
            text = f"{wanted} at this site ({self.place})"
            if value is None or value in ([], {}, ""):
                line = self._with_remedy(f"{wanted} at this site", "give it a value")
                return Problem(self.place, self.key, line)
        elif shown:
            text = f"is forbidden at this site ({self.place})"
        else:
            text = f"may not be set at this site ({self.place})"
        bad = self._bad(value, plain)
        if bad is None:
            return None
        place = where(f"{self.key}.{bad}" if isinstance(value, dict) else self.key)
        if shown and not self.key.startswith("job.env."):
            text = f"{text}, not {bad}" if self.required else f"{bad} {text}"
        return Problem(place, self.key, self._with_remedy(text, "omit or change it"))

    def _bad(self, value: object, plain: object) -> str | None:
        """Return the first word of ``value`` that the rule refuses; None if there is none."""
        if self.values is None:
            return None if self.required or value == plain else ""
        # A rule may name a combination, such as the constraint a100&ib.
        whole = self.values.has(value, value) if isinstance(value, str) else False
        found = ((self.values.has(*word), word[1]) for word in _items(self.key, value))
        if self.required:
            return None if whole else next((word for known, word in found if not known), None)
        return next((word for known, word in found if known), str(value) if whole else None)

    def _with_remedy(self, text: str, remedy: str) -> str:
        return f"{text}: {self.message}" if self.message else f"{text}; {remedy}"


def read_rules(layer: Layer) -> list[Rule]:
    """Return the rules of a site's file.

    Raises:
        ConfigError: a key does not exist, or cannot have the value of its rule.
    """
    sections: dict[str, Mapping[str, object]] = {}
    problems = []
    for name in (*SECTIONS, "messages"):
        given = layer.values.get(name) or {}
        if isinstance(given, Mapping):
            sections[name] = given
        else:
            text = "should be keys, such as `job.partition: [debug]`"
            problems.append(Problem(layer.where[name], name, text))
    if problems:
        raise ConfigError(problems)
    known = list(known_keys(Config))
    ruled = {key for name in SECTIONS for key in sections[name]}
    rules = []
    for name, section in sections.items():
        for key, given in section.items():
            place = layer.where[f"{name}.{key}"]
            kind = kind_at(key.split("."))
            wrong = ""
            if kind == "unknown" or (key not in known and not key.startswith("job.env.")):
                wrong = unknown(key, known)
            elif kind == "section":
                wrong = f"is a section; name a key of it, such as {key}.KEY"
            elif name == "messages" and key not in ruled:
                wrong = "no rule of this file is about this key; add it to forbid or require"
            elif name != "messages":
                try:
                    values = None if given is None else _values(key, given)
                except ValueError as error:
                    wrong = str(error)
                else:
                    message = str(sections["messages"].get(key) or "")
                    rules.append(Rule(name == "require", key, values, place, message))
            if wrong:
                problems.append(Problem(place, f"{name}: {key}", wrong))
    if problems:
        raise ConfigError(problems)
    return rules


def _values(key: str, given: object) -> Values:
    """Return the values of a rule for ``key``; raises ValueError if the key cannot have one of them."""
    shown, exact, patterns = list[str](), set[str](), list[str]()
    for item in given if isinstance(given, list) else [given]:
        if item is None:
            raise ValueError("a value may not be null; use require, without a value")
        if (key, item) == (EXECUTOR, "auto"):
            raise ValueError("name the executor that auto chooses, slurm or local, instead of auto")
        text = _text(item)
        shown.append(text)
        exact.add(text)
        if isinstance(item, str) and any(letter in item for letter in "*?["):
            patterns.append(item)
        elif kind_at(key.split(".")) not in ("list", "mapping"):
            exact.update(comparable for comparable, _ in _forms(key, _checked(key, item)))
    return Values(shown, frozenset(exact), patterns)


def _checked(key: str, item: object) -> object:
    """Return ``item`` as a config has it; raises ValueError if it is no value of ``key``."""
    values = item
    for part in reversed(key.split(".")):
        values = {part: values}
    try:
        return value_at(Config.model_validate(values).model_dump(mode="json"), key)
    except ValidationError as error:
        raise ValueError(words(error.errors()[0], [])[1]) from error


def value_at(values: object, key: str) -> object:
    """Return the value of the dotted ``key`` in the nested ``values``; None if there is none."""
    for part in key.split("."):
        values = values.get(part) if isinstance(values, dict) else None
    return values


def _items(key: str, value: object) -> Iterator[tuple[str, str]]:
    """Yield the :func:`_forms` of each item of a list, name of a variable, or name in a text."""
    if isinstance(value, list | dict):
        yield from ((text, text) for text in map(_text, value))
    elif isinstance(value, str) and key not in ("job.nodes", "job.mem"):
        yield from ((word, word) for word in re.split(_OPERATORS.get(key, ","), value) if word)
    elif value is not None:
        yield from _forms(key, value)


def _forms(key: str, value: object) -> Iterator[tuple[str, str]]:
    """Yield what a rule compares: the comparable form of ``value`` or of each count, and that in messages."""
    if key == "job.nodes" and isinstance(value, int | str):
        least, most = node_limits(value)
        yield from ((str(count), str(count)) for count in range(least, most + 1))
    elif key == "job.mem" and isinstance(value, str):
        # sbatch(1): without a unit, the number counts mebibytes.
        number, unit = (value[:-1], value[-1]) if value[-1] in _KIB else (value, "M")
        yield f"{int(number) * _KIB[unit]}K", value
    else:
        yield _text(value), _text(value)


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
