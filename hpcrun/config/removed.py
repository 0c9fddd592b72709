"""Keys of earlier versions, which the configs of older runs still have.

A run stores its config with every default. An upgrade of hpcrun must not end a job that waits or runs, so a
removed key counts as absent if its value asks for what this version always does.
"""

from collections.abc import Mapping
from typing import Any

_ANY = object()
REMOVED: dict[str, Any] = {
    "checkpoint.stage_dir": None,
    "fsdp.buffer_dtype": None,
    # These keys had an effect only together with a value that this version refuses, or chose a folder.
    **dict.fromkeys(("fsdp.classes", "optim.muon_momentum", "train.checkpoint_blocks"), _ANY),
    "train.compile_cache": _ANY,
    "job.cluster": None,
    "job.same_code": False,
    "train.channels_last": False,
    "train.float8": False,
    "train.min_delta": 0.0,
    "train.nonfinite": "skip",
    "train.sync_batchnorm": False,
    "train.uneven": "across",
}
"""Each removed key, and the value that asks for what this version does."""

RENAMED = {"train.compression": "train.comm_hook"}
"""Each key with another name today; its values have the same meaning."""


def without_removed(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str], dict[str, Any]]:
    """Return ``values`` without the keys that an earlier version had, and with today's names.

    Args:
        values: the values of a stored config, by section.

    Returns:
        The values, the removed keys that may be ignored, and those with a value that asks for something else.
        Keys are dotted.
    """
    kept = {name: dict(part) if isinstance(part, dict) else part for name, part in values.items()}
    for old, new in RENAMED.items():
        section, _, name = old.partition(".")
        part = kept.get(section)
        if isinstance(part, dict) and name in part:
            part.setdefault(new.partition(".")[2], part[name])
            del part[name]
    ignored: list[str] = []
    refused: dict[str, Any] = {}
    for key, present in REMOVED.items():
        section, _, name = key.partition(".")
        part = kept.get(section)
        if not isinstance(part, dict) or name not in part:
            continue
        value = part.pop(name)
        if present is _ANY or value == present:
            ignored.append(key)
        else:
            refused[key] = value
    return kept, ignored, refused
