"""Whether two configs train the same thing: what a resume may change, and what it may not."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from hpcrun.config.schedule import decay_begins, least_steps
from hpcrun.config.schema import Config

# Where it runs, how often it saves and what it tells, not what it computes.
_MAY_CHANGE = frozenset({"name", "job", "restarts", "checkpoint", "watch"})
# Nor do these: two end a training that they do not like, and change nothing in one that ends well.
_MAY_CHANGE_IN_TRAIN = frozenset(
    {
        *("timeout", "hang_after", "hang_start", "profile", "affinity"),
        *("log_every", "stop_check_every", "nonfinite", "nonfinite_limit"),
    }
)
# How the same sums are computed: a checkpoint does not remember these, and the samples stay in order.
_WAYS = (
    *("train.micro_batch", "train.accumulation"),
    *("train.activation_checkpointing", "train.checkpoint_blocks"),
    *("train.parallel", "train.find_unused_parameters", "train.gradient_as_bucket_view"),
    *("fsdp.shard", "fsdp.wrap", "fsdp.min_parameters", "fsdp.classes"),
    *("fsdp.reshard_after_forward", "fsdp.cpu_offload"),
    *("train.compile", "train.compile_mode", "train.deterministic", "optim.fused"),
    *("data.workers", "data.prefetch"),
)
# PowerSGD remembers errors by DDP's buckets, and what moves gradients between these would mix them up.
_WAYS_WITH_BUCKETS = (
    *("train.micro_batch", "train.accumulation", "data.workers", "data.prefetch"),
    *("train.deterministic", "optim.fused"),
)
# What is free until the learning rate begins to come down.
_LENGTH = ("train.steps", "optim.schedule", "optim.decay_steps", "optim.final_lr_fraction")
# What only looks at the weights, where neither the end nor the best of them hangs on it.
_VALIDATION = ("train.validate_every", "train.validate_batches")
# Whether the best weights are kept is for good, and not how many.
_BEST = "checkpoint.keep_best"


def training_fingerprint(config: Config) -> str:
    """A short hash of everything that decides the weights (not of the job, restarts or name)."""
    text = json.dumps(_essence(config), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def training_differences(old: Config, new: Config, stands: int | None = None) -> list[str]:
    """The keys that decide the weights and differ, each as ``train.lr: 0.001 -> 0.003``.

    ``stands``: the steps taken so far, if more are to come: keys that none of them has felt do not count.
    """
    free = _ways(old) & _ways(new)
    if not _judged(old) and not _judged(new):
        free |= frozenset(_VALIDATION)
    if old.checkpoint.keep_best and new.checkpoint.keep_best:
        free |= {_BEST}
    if stands is not None and _open(old, new, stands):
        free |= frozenset(_LENGTH)
    told = differing(_essence(old), _essence(new))
    return [line for line in told if line.partition(":")[0] not in free]


def lengths_left(old: Config, new: Config, stands: int) -> str | None:
    """What length a run may still have after ``stands`` steps, in words; None if that of ``new`` is one."""
    refused = training_differences(old, new, stands)
    if not any(line.partition(":")[0] in _LENGTH for line in refused):
        return None
    least = least_steps(new, stands)
    if stands >= old.train.steps:
        return "there are no more to take, and it becomes no longer"
    if stands >= decay_begins(old):
        return (
            f"since step {decay_begins(old):.0f} its learning rate comes down towards step "
            f"{old.train.steps}, which stays its last"
        )
    if least is None:
        return f"with optim.schedule={new.optim.schedule} the learning rate would have come down already"
    return f"with optim.schedule={new.optim.schedule} train.steps may be {least} or more"


def ways(config: Config) -> dict[str, Any]:
    """What a resume may change and bits depend on: how the sums are computed, and not which."""
    values = _flat(config.model_dump(mode="json"))
    return {key: values[key] for key in _WAYS}


def differing(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """The keys whose values differ, each as ``train.lr: 0.001 -> 0.003``."""
    missing = "absent"
    return [
        f"{key}: {before.get(key, missing)} -> {after.get(key, missing)}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key, missing) != after.get(key, missing)
    ]


def _open(old: Config, new: Config, stands: int) -> bool:
    """Whether after so many steps a training may still become as long as ``new`` wants it."""
    felt = min(decay_begins(old), decay_begins(new))
    return stands < min(old.train.steps, new.train.steps) and (not stands or stands < felt)


def _ways(config: Config) -> frozenset[str]:
    return frozenset(_WAYS_WITH_BUCKETS if config.train.compression == "powersgd" else _WAYS)


def _judged(config: Config) -> bool:
    """Whether validations decide when the training ends, or which of its weights are the best."""
    return config.train.patience is not None or config.checkpoint.keep_best > 0


def _essence(config: Config) -> dict[str, Any]:
    values = config.model_dump(mode="json", exclude=set(_MAY_CHANGE))
    for key in _MAY_CHANGE_IN_TRAIN:
        del values["train"][key]
    return _flat(values) | {_BEST: config.checkpoint.keep_best}


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
