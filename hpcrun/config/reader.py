"""Parser of config files and overrides: returns plain values, and the place of each value.

Every layer stores the place of each key, so that a late problem is still reported with the line to correct.

Scalars follow the core schema of YAML 1.2 (yaml.org/spec/1.2.2, chapter 10.3). PyYAML's loader follows YAML
1.1, in which `3e-4` is text, `1:30:00` is the number 5400 and `no` is false.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import yaml

from hpcrun.config.problems import (
    MASK,
    ConfigError,
    Problem,
    is_secret,
    printable,
    value_text,
)
from hpcrun.config.schema import kind_at

_TAG = "tag:yaml.org,2002:"
# Numbers with leading zeros, and numbers too long for Python to convert, stay text.
SCALARS = {
    "null": re.compile(r"(?:~|null|Null|NULL|)\Z"),
    "bool": re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z"),
    "int": re.compile(r"[-+]?(?:0|[1-9][0-9]{0,999})\Z"),
    "float": re.compile(
        r"[-+]?(?:(?:\.[0-9]+|(?:0|[1-9][0-9]*)(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|\.(?:inf|Inf|INF))\Z"
        r"|\.(?:nan|NaN|NAN)\Z"
    ),
}


class _Loader(yaml.SafeLoader):
    """PyYAML's parser with the scalars of YAML 1.2."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 (PyYAML fills it by subclass)


if yaml.__with_libyaml__:

    class _FastLoader(yaml.CSafeLoader):
        """libyaml's parser, eight times as fast, with the scalars of YAML 1.2."""

        yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 (PyYAML fills it by subclass)

    _FAST: type[yaml.CSafeLoader] | None = _FastLoader
else:
    _FAST = None

for _name, _pattern in SCALARS.items():
    _Loader.add_implicit_resolver(_TAG + _name, _pattern, None)
    if _FAST is not None:
        _FAST.add_implicit_resolver(_TAG + _name, _pattern, None)

DEEPEST = 100
"""Levels of nesting in a config."""
TOO_DEEP = "is nested too deeply for a config"
_NOT_YAML = "not valid YAML"
_LONG = 1 << 14
_MOST_VALUES = 100_000
TOO_MANY = f"has more than {_MOST_VALUES} values; an alias (*name) repeats all that it names"


_SUFFIXES = (".yaml", ".yml", ".json")
_MOST_BYTES = 1 << 20  # a checkpoint given as config by mistake would take minutes to parse


@dataclass(frozen=True)
class Layer:
    """Values of a source: a file, the command line or a profile.

    Attributes:
        values: the values, nested by section.
        where: the place of each dotted key, such as ``gpt.yaml:12``.
    """

    values: Mapping[str, object] = field(default_factory=dict)
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
        refuse(shown, f"the name of a config file must end in {', '.join(_SUFFIXES)}")
    text = _text(_read(path, shown) if content is None else content, shown)
    read = read_json if path.suffix.lower() == ".json" else read_yaml
    values, where = read(text, lambda line: f"{shown}:{line}")
    if values is None:
        values = {}
    if not isinstance(values, dict):
        refuse(f"{shown}:1", "a config should be keys and values, such as `seed: 1`")
    return Layer(values, where)


def read_yaml(
    text: str, place: Callable[[int], str], path: tuple[str, ...] = ()
) -> tuple[object, dict[str, str]]:
    """Return the value of a YAML text, and the place of each dotted key in it.

    `place` converts a line number, from 1, to the place in a message; `path` is the key of the value.

    Raises:
        ConfigError: the text is not valid YAML, or gives a key twice.
    """
    try:
        node = _composed(text, place)
        walk = _Walk(place)
        value = None if node is None else walk.value(node, path)
    except yaml.MarkedYAMLError as error:
        _refuse_syntax(error, place)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(
            [
                Problem(
                    place(line),
                    "",
                    f"a config may not contain the character {error.character:#04x}",
                )
            ]
        ) from None
    except RecursionError:
        raise ConfigError([Problem(place(1), "", TOO_DEEP)]) from None
    if walk.problems:
        raise ConfigError(problem for _, problem in sorted(walk.problems, key=lambda it: it[0]))
    return value, walk.where


def _composed(text: str, place: Callable[[int], str]) -> yaml.Node | None:
    """Return the top node of a YAML text; raises YAMLError.

    A long text is first read without recursion: libyaml's composer has no limit for nesting, and crashes.
    """
    if len(text) > _LONG and _FAST is not None:
        depth = 0
        try:
            for number, event in enumerate(yaml.parse(text, Loader=_FAST)):
                if number > 3 * _MOST_VALUES:
                    raise ConfigError([Problem(place(1), "", TOO_MANY)])
                depth += isinstance(event, yaml.CollectionStartEvent)
                depth -= isinstance(event, yaml.CollectionEndEvent)
                if depth > DEEPEST:
                    line = event.start_mark.line if event.start_mark else 0
                    raise ConfigError([Problem(place(line + 1), "", TOO_DEEP)])
            return _FAST(text).get_single_node()
        except yaml.YAMLError:
            # PyYAML's own parser reports it in the same words as for a short text.
            pass
    return _Loader(text).get_single_node()


def read_json(text: str, place: Callable[[int], str]) -> tuple[object, dict[str, str]]:
    """Return the same as `read_yaml` for a JSON text: JSON is YAML, except for tabs and these characters."""
    printed = re.sub(r"[\x7f-\x9f\u2028\u2029]", lambda found: f"\\u{ord(found[0]):04x}", text)
    try:
        return read_yaml(printed.replace("\t", " "), place)
    except ConfigError as error:
        if not all(problem.text.startswith(_NOT_YAML) for problem in error.problems):
            raise
        # With comments or single quotes it is no JSON either, but YAML reads it.
        try:
            json.loads(text)
        except json.JSONDecodeError as wrong:
            reason = f"not valid JSON: {wrong.msg} in column {wrong.colno}"
            raise ConfigError([Problem(place(wrong.lineno), "", reason)]) from None
        except RecursionError:
            raise ConfigError([Problem(place(1), "", TOO_DEEP)]) from None
        raise


def _refuse_syntax(error: yaml.MarkedYAMLError, place: Callable[[int], str]) -> NoReturn:
    mark = error.problem_mark or error.context_mark
    reason = error.problem or error.context or "cannot be read"
    # The name of an alias, a tag or an anchor: a token that begins with *, ! or & needs quotes.
    reason = re.sub(r" '(?!<)[^']{3,}'", "", reason)
    if "'\\t'" in reason:
        reason = "a tab in the indentation; indent with spaces"
    elif reason.startswith("mapping values are not allowed"):
        reason = "a second ': ' in one line, or wrong indentation; quote text that contains ': '"
    elif error.context and error.context_mark and mark and error.context_mark.line != mark.line:
        reason = f"{reason} ({error.context} of line {error.context_mark.line + 1})"
    where = place(mark.line + 1 if mark else 1)
    raise ConfigError([Problem(where, "", f"{_NOT_YAML}: {reason}")]) from None


class _Walk:
    """A walk over the nodes of a text, which collects the place of every key and all problems."""

    def __init__(self, place: Callable[[int], str]) -> None:
        self.place = place
        self.where: dict[str, str] = {}
        self.problems: list[tuple[int, Problem]] = []
        self._values = 0

    def value(self, node: yaml.Node, path: tuple[str, ...]) -> object:
        """Return the plain value of the node at a path of keys.

        Raises:
            ConfigError: the text has too many values, with those that aliases repeat, or too many levels.
        """
        self._values += 1
        if self._values > _MOST_VALUES:
            raise ConfigError([Problem(self.place(node.start_mark.line + 1), "", TOO_MANY)])
        if len(path) > DEEPEST:
            raise ConfigError([Problem(self.place(node.start_mark.line + 1), "", TOO_DEEP)])
        if path:
            self.where.setdefault(".".join(path), self.place(node.start_mark.line + 1))
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, path)
        if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
            return [self.value(item, (*path, str(index))) for index, item in enumerate(node.value)]
        self._refuse_tag(node, path)
        return None

    def _mapping(self, node: yaml.MappingNode, path: tuple[str, ...]) -> dict[str, object]:
        values: dict[str, object] = {}
        lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self._refuse(key_node, path, "a key should be one word, not a list or a mapping")
                continue
            key = self._text(key_node, path)
            below = (*path, key)
            if key == "<<" and key_node.style is None:
                self._refuse(key_node, path, "merge keys (<<) are not supported; repeat the keys")
            elif key in lines:
                text = f"is given twice, first on line {lines[key]}; remove one of them"
                self._refuse(key_node, below, text)
            else:
                lines[key] = key_node.start_mark.line + 1
                # Use the key's line: a block of values starts on the next line.
                self.where[".".join(below)] = self.place(lines[key])
                values[key] = self.value(value_node, below)
        return values

    def _scalar(self, node: yaml.ScalarNode, path: tuple[str, ...]) -> object:
        kind = node.tag.removeprefix(_TAG)
        if kind == "null":
            return None
        if kind == "str" or (kind in SCALARS and kind_at(path) == "text"):
            return self._text(node, path)
        try:
            if kind == "bool" and SCALARS["bool"].match(node.value):
                return node.value.lower() == "true"
            if kind == "int":
                return int(node.value)
            if kind == "float":
                return float(re.sub(r"\.(?=inf|nan)", "", node.value.lower()))
        except ValueError:
            shown = MASK if is_secret(".".join(path)) else value_text(node.value)
            self._refuse(node, path, f"{shown} is not a valid {kind}")
            return None
        self._refuse_tag(node, path)
        return None

    def _refuse_tag(self, node: yaml.Node, path: tuple[str, ...]) -> None:
        shown = MASK if is_secret(".".join(path)) else printable(node.tag)
        self._refuse(
            node, path, f"the tag {shown} has no meaning here; quote text that begins with !"
        )

    def _text(self, node: yaml.ScalarNode, path: tuple[str, ...]) -> str:
        # JSON writes a character above 16 bits as two escapes, which PyYAML does not combine.
        text = str(node.value).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        if "\ufffd" in text and "\ufffd" not in node.value:
            self._refuse(node, path, "contains half a character (a lone surrogate)")
        return text

    def _refuse(self, node: yaml.Node, path: tuple[str, ...], text: str) -> None:
        line = node.start_mark.line + 1
        self.problems.append((line, Problem(self.place(line), ".".join(path), text)))


def _read(path: Path, shown: str) -> bytes:
    try:
        # Otherwise the open of a FIFO waits for its writer.
        with open(
            path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)
        ) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                refuse(shown, "is a pipe or a device, not a file; give a YAML or JSON file")
            return file.read(_MOST_BYTES + 1)
    except FileNotFoundError:
        refuse(shown, f"no such file{_nearest_file(path)}")
    except IsADirectoryError:
        refuse(shown, "is a directory; give a YAML or JSON file in it")
    except OSError as error:
        refuse(shown, f"cannot be read: {error.strerror}")


def _text(data: bytes, shown: str) -> str:
    if len(data) > _MOST_BYTES:
        refuse(shown, f"is larger than {_MOST_BYTES >> 20} MiB, too large for a config")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        byte = data[error.start]
        refuse(f"{shown}:{line}", f"byte {byte:#04x} is not UTF-8; save the file as UTF-8")


def _nearest_file(path: Path) -> str:
    try:
        names = [entry.name for entry in path.parent.iterdir() if entry.suffix in _SUFFIXES]
    except OSError:
        return ""
    near = difflib.get_close_matches(path.name, names, n=1)
    return f"; did you mean {_shown(path.parent / near[0])}?" if near else ""


def _shown(path: Path) -> str:
    return printable(str(path).encode("utf-8", "backslashreplace").decode())


def refuse(place: str, text: str, key: str = "") -> NoReturn:
    raise ConfigError([Problem(place, key, text)])
