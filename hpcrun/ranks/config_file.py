"""A DistributedConfig as a YAML or JSON file; imported only if a program reads or writes one."""

import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError

from hpcrun.config.problems import ConfigError, Problem, nearest, words
from hpcrun.config.reader import file_layer
from hpcrun.errors import ClusterError
from hpcrun.run.files import write_atomic

T = TypeVar("T")

SECTION = "parallel"
"""A file with other settings has the fields in a section of this name."""

_FORMATS = (".yaml", ".yml", ".json")


def read_config(path: Path, fields: Collection[str], make: Callable[[dict[str, Any]], T]) -> T:
    """Return ``make(values)`` for the values in the file, or in its section ``parallel``.

    Args:
        path: the file; its suffix decides the format.
        fields: the keys that the file may have.
        make: checks the values; raises pydantic's ValidationError or ClusterError.

    Raises:
        ConfigError: the file cannot be read, or a key or value is wrong; each line has the file, the line,
            the key and the remedy.
    """
    layer = file_layer(path)
    values, before = layer.values, ""
    section = values.get(SECTION)
    if isinstance(section, Mapping):
        values, before = section, f"{SECTION}."
    try:
        return make(dict(values))
    except ValidationError as error:
        found = [_problem(dict(one), fields, before) for one in error.errors()]
        problems = [Problem(_place(layer.where, key, str(path)), key, text) for key, text in found]
        raise ConfigError(dict.fromkeys(problems)) from None
    except ClusterError as error:
        raise ConfigError([Problem(str(path), before.rstrip("."), str(error))]) from error


def _problem(error: Any, fields: Collection[str], before: str) -> tuple[str, str]:
    key, text = words(error, fields)
    if error["type"] == "extra_forbidden":
        near = nearest(key, fields)
        text = (
            f"unknown key; did you mean {' or '.join(near)}?"
            if near
            else (
                f"unknown key; remove it, or put it outside of `{SECTION}:`; the keys are {', '.join(fields)}"
            )
        )
    return f"{before}{key}", text


def _place(where: Mapping[str, str], key: str, path: str) -> str:
    """Return the place of ``key``, or of the nearest section around it."""
    while key and key not in where:
        key = key.rpartition(".")[0]
    return where.get(key, path)


def write_config(path: Path, values: Mapping[str, Any]) -> None:
    """Write the values to the file, all or nothing.

    Raises:
        ConfigError: the suffix is not .yaml, .yml or .json, or the file cannot be written.
    """
    suffix = path.suffix.lower()
    if suffix not in _FORMATS:
        raise ConfigError([Problem(str(path), "", f"the name must end in {', '.join(_FORMATS)}")])
    if suffix == ".json":
        text = json.dumps(values, indent=2) + "\n"
    else:
        text = yaml.safe_dump(dict(values), sort_keys=False)
    try:
        write_atomic(path, text)
    except OSError as error:
        raise ConfigError(
            [Problem(str(path), "", f"cannot be written: {error.strerror}; check the folder")]
        ) from error
