"""Comparison of two configs: the keys that a resume may change, and the keys that it may not."""

import math
from collections.abc import Mapping
from difflib import SequenceMatcher
from pathlib import Path
from typing import NamedTuple

from pydantic_core import ValidationError

from hpcrun.config.config import Config

# Sections about the place of the run, its saves and its logs; they do not change the computation.
_NOT_RECORDED = frozenset({"name", "job", "restarts", "watch"})
_MAY_CHANGE = _NOT_RECORDED | {"checkpoint"}
_MAY_BE_SECRET = ("job.env", "job.setup", "job.node_setup", "watch.notify")
# Keys with no effect on the weights; two of them can end a run, but do not change a run that ends well.
_MAY_CHANGE_IN_TRAIN = frozenset(
    {
        *("timeout", "hang_after", "hang_start", "connect_timeout", "profile", "affinity"),
        *("log_every", "stop_check_every", "nonfinite_limit"),
    }
)
# The weights have the same bits with each value.
_MAY_CHANGE_IN_FSDP = ("deferred_init", "reshard_after_forward")
# Ways to compute the same sums: a checkpoint does not depend on them, and the order of samples stays.
_WAYS = (
    *("train.micro_batch", "train.accumulation"),
    "train.activation_checkpointing",
    *("train.parallel", "train.find_unused_parameters", "train.gradient_as_bucket_view"),
    "train.bucket_mb",
    *("fsdp.shard", "fsdp.wrap", "fsdp.min_parameters", "fsdp.cpu_offload"),
    "fsdp.reduce_each_micro_batch",
    *("train.compile", "train.compile_mode", "train.deterministic", "optim.fused"),
    *("data.workers", "data.prefetch"),
)
_REDUCE_EACH = "fsdp.reduce_each_micro_batch"
_SHARD = "fsdp.shard"
# Keys that may change until the decay of the learning rate begins.
_LENGTH = ("train.steps", "optim.schedule", "optim.decay_steps", "optim.final_lr_fraction")
# Keys that may change unless early stopping or the best weights depend on validation.
_VALIDATION = ("train.validate_every", "train.validate_batches")
# A resume may change how many best checkpoints are kept, but not whether any are kept.
_BEST = "checkpoint.keep_best"


class Changes(NamedTuple):
    """Changes of a config since a checkpoint, each as ``train.lr: 0.001 -> 0.003``.

    ``refused``: a resume may not change these keys. ``allowed``: it may, and names them; without the keys of
    `ways`. ``hint``: the allowed values of ``train.steps``, if the change of it is refused.
    """

    refused: list[str]
    allowed: list[str]
    hint: str | None

    def refusal(self, path: Path, step: int) -> str:
        """Return the message for ``path``, a config that cannot continue from ``step``."""
        hint = f" ({self.hint})" if self.hint else ""
        return (
            f"{path}: cannot continue from step {step}, which was saved with another config: "
            f"{'; '.join(self.refused)}{hint}; put the old values back, or submit with another --name"
        )


def recorded(config: Config) -> dict[str, object]:
    """Return the values of ``config`` that a checkpoint records: all except those of the job and its logs."""
    return config.model_dump(mode="json", exclude=set(_NOT_RECORDED))


def changes_since(
    before: Mapping[str, object] | None, config: Config, steps_done: int
) -> Changes | None:
    """Compare ``config`` with the values that a checkpoint recorded.

    Args:
        before: the result of `recorded` for the config that saved the checkpoint, if there is any.
        steps_done: number of finished steps in the checkpoint.

    Returns:
        The changes; None if ``before`` is missing or not a config of this version of hpcrun.
    """
    try:
        old = Config.model_validate(before)
    except ValidationError:
        return None
    refused = training_differences(old, config, steps_done)
    lines = differing(_flat(recorded(old)), _flat(recorded(config)))
    # Each start chooses the last key anew, and names the choice.
    known = {line.partition(":")[0] for line in refused} | {*_WAYS, "fsdp.reshard_after_forward"}
    allowed = [line for line in lines if line.partition(":")[0] not in known]
    return Changes(refused, allowed, lengths_left(old, config, steps_done))


def all_differences(old: Config, new: Config) -> list[str]:
    """Return the keys of ``old`` with another value in ``new``, as :func:`differing`; ``***`` for secrets."""
    before, after = (_flat(config.model_dump(mode="json")) for config in (old, new))
    return [
        f"{key}: *** -> ***" if key.startswith(_MAY_BE_SECRET) else line
        for line in differing(before, after)
        for key in [line.partition(":")[0]]
    ]


def training_differences(old: Config, new: Config, steps_done: int | None = None) -> list[str]:
    """Return the different keys that decide the weights, each as ``train.lr: 0.001 -> 0.003``.

    Args:
        old: the config of the run so far.
        new: the config of the resume.
        steps_done: number of finished steps, if more steps follow. Keys without effect on the finished steps
            are omitted.
    """
    free = frozenset(_WAYS)
    if not _needs_validation(old) and not _needs_validation(new):
        free |= frozenset(_VALIDATION)
    if old.checkpoint.keep_best and new.checkpoint.keep_best:
        free |= {_BEST}
    if steps_done is not None and _may_change_length(old, new, steps_done):
        free |= frozenset(_LENGTH)
    lines = differing(_essence(old), _essence(new))
    return [line for line in lines if line.partition(":")[0] not in free]


def lengths_left(old: Config, new: Config, steps_done: int) -> str | None:
    """Say until when the length of a started run may change; None if the change is allowed.

    Args:
        old: the config of the run so far.
        new: the config of the resume.
        steps_done: number of finished steps.
    """
    refused = training_differences(old, new, steps_done)
    if not any(line.partition(":")[0] in _LENGTH for line in refused):
        return None
    if steps_done >= old.train.steps:
        return "the run cannot become longer"
    decay = min(decay_begins(old), decay_begins(new))
    if steps_done >= decay:
        return f"the length may change only before the learning rate decays, from step {decay:.0f}"
    return f"train.steps must be more than {steps_done}"


def parallelism(config: Config) -> dict[str, object]:
    """Return the values of ``config`` that a resume may change but that may change the last bits.

    These keys choose the way to compute the same sums, such as the parallelism.
    """
    values = _flat(config.model_dump(mode="json"))
    if values["train.deterministic"] == "strict":
        values["train.deterministic"] = True  # The same kernels.
    return {key: values[key] for key in _WAYS}


def changed_ways(
    before: Mapping[str, object], config: Config, *, sharded: bool, auto_reduces: bool | None = None
) -> list[str]:
    """Return how ``config`` differs from the ways that a checkpoint recorded, each as ``key: 1 -> 2``.

    A key that the checkpoint lacks, because it is newer, counts with its default.

    Args:
        before: the result of `ways` of the config that saved the checkpoint.
        sharded: the training uses FSDP; otherwise the keys of `fsdp` have no effect.
        auto_reduces: what ``fsdp.reduce_each_micro_batch=auto`` stands for with this model; None if a step
            has one micro-batch, so that the key has no effect.
    """
    now = parallelism(config)
    then = parallelism(Config()) | dict(before)
    for values in (then, now):
        if auto_reduces is None or values[_REDUCE_EACH] == "auto":
            values[_REDUCE_EACH] = auto_reduces
    if then[_SHARD] == "auto":
        then[_SHARD] = now[_SHARD]  # Only a training without FSDP records this value.
    compared = [key for key in now if sharded or not key.startswith("fsdp.")]
    return differing({key: then[key] for key in compared}, {key: now[key] for key in compared})


def differing(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    """Return the keys whose values differ between ``before`` and ``after``: ``train.lr: 0.001 -> 0.003``."""
    missing = "absent"
    return [
        f"{key}: {' -> '.join(_changed(before.get(key, missing), after.get(key, missing)))}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key, missing) != after.get(key, missing)
    ]


_LONG_LIST = 4
"""Entries of a list that are shown whole."""


def _changed(before: object, after: object) -> tuple[str, str]:
    """Return both values; of long lists of words, such as a command, the words that differ.

    The option before a changed value stays, and ``…`` is in place of equal words.
    """
    if not isinstance(before, list) or not isinstance(after, list):
        return str(before), str(after)
    if max(len(before), len(after)) <= _LONG_LIST:
        return str(before), str(after)
    old, new = [*map(str, before)], [*map(str, after)]
    shown: tuple[list[str], list[str]] = ([], [])
    matcher = SequenceMatcher(None, old, new, autojunk=False)
    for what, first, end, new_first, new_end in matcher.get_opcodes():
        if what == "equal":
            option = old[end - 1]
            kept = ["…", option] if end < len(old) and option.startswith("-") else ["…"]
            kept = [option] if end - first == 1 and len(kept) > 1 else kept
            for words in shown:
                words += kept
        else:
            shown[0].extend(old[first:end])
            shown[1].extend(new[new_first:new_end])
    first_text, second_text = (" ".join(words).replace("… …", "…") for words in shown)
    return first_text, second_text


def _may_change_length(old: Config, new: Config, steps_done: int) -> bool:
    """Return True if the run can still get the length of ``new`` after ``steps_done`` steps."""
    decay = min(decay_begins(old), decay_begins(new))
    return steps_done < min(old.train.steps, new.train.steps) and (
        not steps_done or steps_done < decay
    )


def _needs_validation(config: Config) -> bool:
    """Return True if validation decides when training ends, or which weights are the best."""
    return config.train.patience is not None or config.checkpoint.keep_best > 0


def _essence(config: Config) -> dict[str, object]:
    values = config.model_dump(mode="json", exclude=set(_MAY_CHANGE))
    for key in _MAY_CHANGE_IN_TRAIN:
        del values["train"][key]
    for key in _MAY_CHANGE_IN_FSDP:
        del values["fsdp"][key]
    return _flat(values) | {_BEST: config.checkpoint.keep_best}


def _flat(values: dict[str, object], prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def decay_begins(config: Config) -> float:
    """Return the first step of ``config`` whose learning rate depends on ``train.steps``, or infinity."""
    optim, steps = config.optim, config.train.steps
    if optim.schedule == "constant":
        return math.inf
    if optim.schedule != "wsd":
        return optim.warmup_steps
    return max(optim.warmup_steps, steps - (optim.decay_steps or max(1, steps // 10)))
