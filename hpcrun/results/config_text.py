"""A run's config as plain values, fast enough for ten thousand runs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from hpcrun.config import ConfigError
from hpcrun.config.reader import read_yaml

SAME_TRAINING = ("job.", "restarts.", "checkpoint.", "watch.")
"""Sections that change where a run works and how often it saves, not what it computes."""

_SECTION = re.compile(r"^(?=[A-Za-z_])", re.MULTILINE)
# Aliases and documents join sections. The expression takes longer than all else: most texts have no mark.
_MARKS = ("&", "*", "%", "---", "...")
_JOINED = re.compile(r"(?:^|\s)[&*][A-Za-z_]|^(?:---|\.\.\.|%)", re.MULTILINE)
_PLAIN_TEXT = re.compile(r"([A-Za-z_]\w*): ([A-Za-z]\w*(?:[-./]\w+)*)\n\Z")
_WORDS = {"null", "true", "false", "yes", "no", "on", "off", "y", "n"}


def parse_config(text: str) -> dict[str, Any]:
    """Return the values of a run's config.yaml.

    The runs of a sweep share most of their sections: each different section is parsed once.

    Raises:
        ValueError: the text is not the YAML of a config.
    """
    if any(mark in text for mark in _MARKS) and _JOINED.search(text):
        return dict(_parse(text))
    values: dict[str, Any] = {}
    for section in _SECTION.split(text):
        plain = _PLAIN_TEXT.match(section)
        if plain and plain[2].lower() not in _WORDS:
            found: Mapping[str, Any] = {plain[1]: plain[2]}
        else:
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
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError("is not keys and values")
    return value


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested values as one level of keys with dots, as in ``train.lr``."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found
