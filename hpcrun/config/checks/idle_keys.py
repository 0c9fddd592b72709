"""Keys without effect because of another key.

If the other key is given too, the combination is deliberate: a sweep varies it, a command line overrides a
file, and a run's stored config has every key. If the other key is not given, the user would silently not get
the requested effect, so the key is an error.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from hpcrun.config.problems import value_text
from hpcrun.config.schema import Config
from hpcrun.config.training import FSDP


@dataclass(frozen=True)
class Idle:
    """A key without an effect, because of the value of the key ``because_of``; ``text`` has the remedy."""

    key: str
    because_of: str
    text: str


_Rule = tuple[tuple[str, ...], str, Callable[[Any], bool], str]

_LIMIT: _Rule = (("train.nonfinite_limit",), "train.nonfinite", lambda it: it == "stop", "skip")

_RULES: tuple[_Rule, ...] = (
    (("train.lr_base_batch",), "train.lr_scaling", lambda it: it == "none", "sqrt or linear"),
    (("train.min_delta",), "train.patience", lambda it: it is None, "a number of validations"),
    (
        ("train.powersgd_rank", "train.powersgd_start"),
        "train.compression",
        lambda it: it != "powersgd",
        "powersgd",
    ),
    (("train.compile_mode", "train.compile_cache"), "train.compile", lambda it: not it, "true"),
    (
        ("train.checkpoint_blocks",),
        "train.activation_checkpointing",
        lambda it: it != "every",
        "every",
    ),
    (("train.hang_start",), "train.hang_after", lambda it: it is None, "a number of seconds"),
    (
        ("train.broadcast_buffers", "train.gradient_as_bucket_view"),
        "train.parallel",
        lambda it: it not in ("auto", "ddp"),
        "ddp",
    ),
    (
        ("train.find_unused_parameters", "train.sync_batchnorm"),
        "train.parallel",
        lambda it: it in ("single", "dp"),
        "ddp or fsdp",
    ),
    (
        tuple(f"fsdp.{name}" for name in FSDP.model_fields),
        "train.parallel",
        lambda it: it not in ("auto", "fsdp"),
        "fsdp",
    ),
    (("fsdp.min_parameters",), "fsdp.wrap", lambda it: it != "size", "size"),
    (("optim.betas", "optim.eps"), "optim.name", lambda it: it == "sgd", "adamw, adam or muon"),
    (("optim.momentum",), "optim.name", lambda it: it != "sgd", "sgd"),
    (("optim.muon_momentum",), "optim.name", lambda it: it != "muon", "muon"),
    (("optim.decay_steps",), "optim.schedule", lambda it: it != "wsd", "wsd"),
    (
        ("optim.final_lr_fraction",),
        "optim.schedule",
        lambda it: it == "constant",
        "a schedule with a decay",
    ),
    (
        (
            "amp.init_scale",
            "amp.growth_factor",
            "amp.backoff_factor",
            "amp.growth_interval",
            "amp.dynamic",
        ),
        "amp.dtype",
        lambda it: it != "fp16",
        "fp16",
    ),
    (
        ("amp.growth_factor", "amp.backoff_factor", "amp.growth_interval"),
        "amp.dynamic",
        lambda it: not it,
        "true",
    ),
    (("data.prefetch",), "data.workers", lambda it: it == 0, "a number of processes"),
    (("checkpoint.minutes",), "checkpoint.auto", lambda it: it, "false"),
)


def idle_keys(config: Config, given: Collection[str]) -> Iterator[Idle]:
    """Yield each ``given`` key that differs from its default and has no effect, once."""
    if config.command:
        return  # A command may read any key.
    seen = set()
    # A dynamic loss scale overflows regularly; these overflows do not count against the limit.
    scaled = config.amp.dtype == "fp16" and config.amp.dynamic
    for keys, other, idles, remedy in _RULES if scaled else (*_RULES, _LIMIT):
        value = _value(config, other)
        for key in keys if idles(value) else ():
            if key in given and key not in seen and _value(config, key) != _default(key):
                seen.add(key)
                shown = value if isinstance(value, str) else json.dumps(value)
                text = f"has no effect with {other}={shown}; omit it, or set {other} to {remedy}"
                yield Idle(key, other, text)
    window = config.train.profile
    if window is not None and int(window.partition("-")[0]) > config.train.steps:
        text = f"{value_text(window)} is after the last step, with train.steps={config.train.steps}"
        yield Idle("train.profile", "train.steps", text)


def _value(config: Config, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def _default(key: str) -> Any:
    section, _, name = key.partition(".")
    return type(Config.model_fields[section].default).model_fields[name].default
