"""Serialization of a config: YAML for the run directory, and the JSON schema for editors."""

from __future__ import annotations

from typing import Any

import yaml

from hpcrun.config.reader import SCALARS
from hpcrun.config.schema import Config
from hpcrun.config.secrets import masked_values


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
    """Return the whole config, defaults included, in the order of the schema.

    Args:
        mask: for a screen: mask the values that are secrets.
    """
    values = config.model_dump()
    return yaml.dump(
        masked_values(values) if mask else values,
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        width=100,
    )


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of a config file, with a description of every key."""
    return Config.model_json_schema()
