"""Whether two configs train the same thing: what a resume may change, and what it may not."""

import hashlib
import json
from typing import Any

from hpcrun.config.schema import Config

# Where and how often it runs, not what it computes.
_MAY_CHANGE = frozenset({"name", "job", "restarts", "watch"})
_MAY_CHANGE_IN_TRAIN = frozenset({"timeout", "hang_after", "hang_start", "profile", "affinity"})


def training_fingerprint(config: Config) -> str:
    """A short hash of everything that decides the weights (not of the job, restarts or name)."""
    text = json.dumps(_essence(config), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def training_differences(old: Config, new: Config) -> list[str]:
    """The keys that decide the weights and differ, each as ``train.lr: 0.001 -> 0.003``."""
    before, after = _flat(_essence(old)), _flat(_essence(new))
    missing = "absent"
    return [
        f"{key}: {before.get(key, missing)} -> {after.get(key, missing)}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key, missing) != after.get(key, missing)
    ]


def _essence(config: Config) -> dict[str, Any]:
    values = config.model_dump(mode="json", exclude=set(_MAY_CHANGE))
    for key in _MAY_CHANGE_IN_TRAIN:
        del values["train"][key]
    return values


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
