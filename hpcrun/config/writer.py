"""Serialization of a config: YAML for the run directory, and the JSON schema for editors.

Secrets are masked: ``watch.notify``, which may have the URL of a webhook, and the values of ``job.env``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import yaml

from hpcrun.config.config import Config
from hpcrun.config.problems import MASK
from hpcrun.config.reader import SCALARS


class _Dumper(yaml.SafeDumper):
    """Quotes text that YAML 1.1 or 1.2 would read as another type, so that any reader returns the text."""

    def ignore_aliases(self, data: object) -> bool:
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
    return dumped(masked_values(values) if mask else values)


def has_secrets(config: Config) -> bool:
    """Return True if :func:`to_yaml` masks a value of ``config``."""
    return bool(config.job.env or config.watch.notify)


_OF_A_SCRIPT = ("name", "command", "job", "restarts")


def script_yaml(config: Config) -> str:
    """Return the part of a config with a command that a script uses, and what differs from the defaults.

    Secrets are masked, as for a screen.

    Args:
        config: a config with a command.
    """
    values, plain = masked_values(config.model_dump()), Config().model_dump()
    shown: dict[str, object] = {}
    for key, value in values.items():
        if key in _OF_A_SCRIPT:
            shown[key] = value
        elif isinstance(value, dict):
            own = {name: one for name, one in value.items() if one != plain[key].get(name)}
            shown |= {key: own} if own else {}
        elif value != plain[key]:
            shown[key] = value
    left = [key for key in values if key not in shown]
    return f"{dumped(shown)}# defaults, which the script may read: {', '.join(left)}\n"


def dumped(content: dict[str, object]) -> str:
    """Return ``content`` as YAML text."""
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def json_schema() -> dict[str, object]:
    """Return the JSON schema of a config file, with a description of every key, for an editor.

    Source: the dialect is draft 2020-12, as pydantic's ``model_json_schema`` writes it.
    """
    return Config.model_json_schema()


_URL = re.compile(r"https?://[^\s'\"|;<>]*[^\s'\"|;<>:,.)]", re.IGNORECASE)
_SECRET = re.compile(
    r"((?:--)?(?:watch\.)?notify=|\s*(?:job\s*(?:\.\s*env\s*(?:\.[^=]*)?)?|watch)\s*=).*", re.DOTALL
)

_SHORTEST_SECRET = 6


def masked(text: str) -> str:
    """Return ``text`` with ``***`` for every URL: who knows that of a webhook can write to its channel."""
    return _URL.sub(MASK, text)


def masked_words(words: list[str]) -> list[str]:
    """Return the ``words`` of a command line with the values of `watch.notify=` and `job.env.X=` masked.

    The text of a program (``python -c``) is masked too: it may call ``hpcrun.submit`` with such values.
    """
    shown = [
        MASK if before == "-c" and "(" in word else word
        for before, word in zip(["", *words], words, strict=False)
    ]
    return [_SECRET.sub(rf"\1{MASK}", word) if _SECRET.fullmatch(word) else word for word in shown]


def hidden_values(words: Sequence[str], text: str) -> str:
    """Return ``text``, a line about the ``words`` of a command line, without their values of `job.env`."""
    for word in words:
        value = word.partition("=")[2] if _SECRET.fullmatch(word) else ""
        # A short value, such as 1 for a switch, is part of many words.
        if len(value) >= _SHORTEST_SECRET:
            text = text.replace(value, MASK)
    return text


def masked_values(values: dict[str, object]) -> dict[str, object]:
    """Return the ``values`` of ``Config.model_dump()`` with ``watch.notify`` and ``job.env`` masked."""
    watch, job = values.get("watch"), values.get("job")
    if isinstance(watch, dict) and isinstance(watch.get("notify"), str):
        values = {**values, "watch": {**watch, "notify": MASK}}
    if isinstance(job, dict) and job.get("env"):
        env = job["env"]
        shown = dict.fromkeys(env, MASK) if isinstance(env, dict) else MASK
        values = {**values, "job": {**job, "env": shown}}
    return values
