"""Serialization of a config: YAML for the run directory, and the JSON schema for editors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import yaml

from hpcrun.config.fields import masked_values
from hpcrun.config.reader import SCALARS
from hpcrun.config.schema import Config


class _Dumper(yaml.SafeDumper):
    """Quotes text that YAML 1.1 or 1.2 would read as another type, so that any reader returns the text."""

    def ignore_aliases(self, data: Any) -> bool:
        """Write a repeated value in full, for readability."""
        return True


for _name, _pattern in SCALARS.items():
    _Dumper.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", _pattern, None)


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    # PyYAML writes characters such as U+0085 unescaped, and a reader takes them for line breaks.
    style = None if text.isprintable() else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


def to_yaml(config: Config, *, mask: bool = False) -> str:
    """Return the whole config as YAML text, with the defaults, in the order of the schema.

    Args:
        config: the config.
        mask: replace secrets such as the URL of a webhook by ``***``, for a screen or a log.
    """
    values = config.model_dump()
    return _dumped(masked_values(values) if mask else values)


def yaml_parts(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the text of each key; one after the other they are the text of the mapping."""
    return {
        name: f"{name}: {_number(value)}\n" if _is_number(value) else _dumped({name: value})
        for name, value in values.items()
    }


def _is_number(value: Any) -> bool:
    return type(value) is int or (type(value) is float and math.isfinite(value))


def _number(value: float) -> str:
    """Return the number as PyYAML writes numbers, in a tenth of its time."""
    text = repr(value)
    return text.replace("e", ".0e", 1) if "e" in text and "." not in text else text


def _dumped(content: dict[str, Any]) -> str:
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of a config file, with a description of every key, for an editor.

    Source: the dialect is draft 2020-12, as pydantic's ``model_json_schema`` writes it.
    """
    return Config.model_json_schema()
