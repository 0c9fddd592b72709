"""Problems of a config, one line each, so that a command reports all of them together."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from pydantic_core import ErrorDetails

from hpcrun.errors import UserError

_LONGEST_VALUE = 60  # maximum characters of a refused value in a message
_LONGEST_KEY = 200
MOST_SHOWN = 40
"""Problems that have a line in a message, which counts the others."""


@dataclass(frozen=True)
class Problem:
    """A problem of a config.

    Attributes:
        place: a file with a line, a flag, or ``command line``.
        key: the dotted key; may be empty.
        text: the description, with a remedy.
    """

    place: str
    key: str
    text: str

    def __str__(self) -> str:
        key = shown_key(self.key)
        key = key if len(key) <= _LONGEST_KEY else f"{key[:_LONGEST_KEY]}…"
        return ": ".join(printable(part) for part in (self.place, key, self.text) if part)


MASK = "***"
"""The text in place of a secret."""
_VARIABLES = "job.env."
ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
"""Form of the name of an environment variable."""


def is_secret(key: str) -> bool:
    """Return True if the value at this key, or a part of it, may be a token."""
    return key in ("job", "job.env", "watch", "watch.notify") or key.startswith(_VARIABLES)


def shown_key(key: str) -> str:
    """Return the key for a message; of a variable of the job only the name, without a value in it."""
    if not key.startswith(_VARIABLES):
        return key
    given = key.removeprefix(_VARIABLES).partition(".")[0]
    name = re.split(r"[^A-Za-z0-9_-]", given, maxsplit=1)[0]
    return _VARIABLES + (name if name == given else f"{name}{MASK}")


class ConfigError(UserError):
    """A config that cannot be used; the text has one line for each problem, up to ``MOST_SHOWN``.

    Attributes:
        problems: the problems.
        more: the number of further problems.
    """

    def __init__(self, problems: Iterable[Problem], more: int = 0) -> None:
        """Collect the problems; ``more``: the number of further problems."""
        self.problems, self.more = tuple(problems), more
        super().__init__("\n".join(self.lines))

    @property
    def lines(self) -> list[str]:
        """Text of `problems`, one line each, and the number of further problems."""
        shown = [str(problem) for problem in self.problems[:MOST_SHOWN]]
        more = self.more + len(self.problems) - len(shown)
        return [*shown, f"and {more} further problems; correct these first"] if more else shown


def printable(text: str) -> str:
    """Return the text with escapes for line breaks and control characters."""
    return text if text.isprintable() else repr(text)[1:-1]


def value_text(value: object) -> str:
    """Return a refused value as the user would write it, on one line and shortened."""
    text = repr(value) if isinstance(value, str) else json.dumps(value, default=repr)
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 1] + "…"


# Names of the same settings in other tools, for users of these tools.
UNKNOWN = "unknown key"
_OTHER_NAMES = {
    "learning_rate": "train.lr",
    "max_steps": "train.steps",
    "num_steps": "train.steps",
    "iterations": "train.steps",
    "global_batch_size": "train.batch_size",
    "grad_accum": "train.accumulation",
    "gradient_accumulation_steps": "train.accumulation",
    "grad_clip": "train.clip_norm",
    "max_grad_norm": "train.clip_norm",
    "num_workers": "data.workers",
    "prefetch_factor": "data.prefetch",
    "micro_batch_size": "train.micro_batch",
    "gradient_checkpointing": "train.activation_checkpointing",
    "torch_compile": "train.compile",
    "strategy": "train.parallel",
    "compression": "train.comm_hook",
    "ema_decay": "train.ema",
    "precision": "amp.dtype",
    "optimizer": "optim.name",
    "num_nodes": "job.nodes",
    "gpus_per_node": "job.gpus",
    "ntasks_per_node": "job.tasks_per_node",
    "walltime": "job.time",
    "time_limit": "job.time",
    "queue": "job.partition",
}
_EPOCHS = frozenset({"epochs", "epoch", "num_epochs", "max_epochs", "num_train_epochs", "n_epochs"})
_KINDS = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_parsing_size": "a whole number of 64 bits",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "text, in quotes if it looks like a number, a date or a boolean",
    "list_type": "a list, such as [a, b]",
    "tuple_type": "a list, such as [a, b]",
    "dict_type": "keys and values",
    "model_type": "keys and values",
    "model_attributes_type": "keys and values",
}
_LIMITS = {
    "greater_than_equal": ("ge", "at least"),
    "greater_than": ("gt", "more than"),
    "less_than_equal": ("le", "at most"),
    "less_than": ("lt", "less than"),
}


def key_of(error: ErrorDetails) -> str:
    """Return the dotted key of a pydantic error."""
    return ".".join(str(part) for part in error["loc"] if part != "[key]")


def words(error: ErrorDetails, known: Collection[str]) -> tuple[str, str]:
    """Return the dotted key of a pydantic error, and a description of the error.

    `known` holds all valid dotted keys; the nearest key is suggested.
    """
    key = key_of(error)
    kind = error["type"]
    context: Mapping[str, object] = error.get("ctx", {})
    secret = is_secret(key)
    value = MASK if secret else value_text(error["input"])
    if kind == "extra_forbidden":
        return key, unknown(key, known)
    if kind == "missing":
        return key, "is missing"
    if kind == "value_error":
        text = str(context["error"])
        return key, text.partition(": ")[0] if secret and key.startswith(_VARIABLES) else text
    if error["input"] is None:
        return key, "may not be null; give it a value or omit the key"
    if kind == "literal_error":
        choices = str(context["expected"]).replace("'", "").replace("True, False", "true, false")
        return key, f"should be {choices}, not {value}{_near_choice(choices, error['input'])}"
    if kind in _LIMITS:
        name, phrase = _LIMITS[kind]
        limit = context[name]
        whole = isinstance(limit, float) and limit.is_integer()
        return key, f"should be {phrase} {f'{limit:.0f}' if whole else limit}, not {value}"
    if kind == "too_long":
        return key, f"should have {context['max_length']} values, not {context['actual_length']}"
    if kind in _KINDS:
        return key, f"should be {_KINDS[kind]}, not {value}"
    return key, f"{error['msg'][:1].lower()}{error['msg'][1:]}, not {value}"


def unknown(key: str, known: Collection[str]) -> str:
    """Return the message for an unknown key, with the nearest known keys."""
    if key in known:  # a dotted key in a file, which must be nested
        section, _, leaf = key.rpartition(".")
        return f"unknown key; write it as `{leaf}` under `{section.replace('.', ': ')}:`"
    if _folded(key.rpartition(".")[2]) in _EPOCHS and "train.steps" in known:
        return (
            "unknown key; set train.steps instead: an epoch has as many steps as the number of samples "
            "divided by train.batch_size; each start prints it"
        )
    if near := nearest(key, known):
        return f"{UNKNOWN}; did you mean {' or '.join(near)}?"
    return f"{UNKNOWN}; `hpcrun config schema` lists all keys"


def nearest(key: str, known: Collection[str]) -> list[str]:
    """Return the valid keys that the user probably meant, at most three, best first.

    The search covers the names of other tools, then the same section, then the same last name in any
    section, and finally a similar last name in any section.
    """
    section, _, leaf = key.rpartition(".")
    leaf = _folded(leaf)
    if _OTHER_NAMES.get(leaf) in known:
        return [_OTHER_NAMES[leaf]]
    siblings = {
        _folded(name.rpartition(".")[2]): name
        for name in known
        if name.rpartition(".")[0] == section
    }
    found = [siblings[name] for name in difflib.get_close_matches(leaf, siblings, n=1)]
    elsewhere = {name: _folded(name.rpartition(".")[2]) for name in known if name not in found}
    found += [name for name, last in elsewhere.items() if last == leaf][: 3 - len(found)]
    if not found:
        close = difflib.get_close_matches(leaf, set(elsewhere.values()), n=1, cutoff=0.75)
        found = [name for name, last in elsewhere.items() if last in close][:3]
    return [printable(name) for name in found]


def _folded(name: str) -> str:
    return name.lower().replace("-", "_")


def _near_choice(choices: str, value: object) -> str:
    names = choices.replace(" or ", ", ").split(", ")
    near = difflib.get_close_matches(str(value).lower(), names, n=1)
    return f"; did you mean {near[0]}?" if near else ""
