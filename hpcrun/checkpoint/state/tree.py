"""Splitting a nested state into named tensors and plain data, and joining them again.

Tensors go to disk as raw bytes, under names that do not depend on the sharding. The rest is small, and plain
enough for ``torch.load(weights_only=True)``.
"""

from collections.abc import Mapping
from typing import Any

import torch

from hpcrun.checkpoint.storage.errors import CheckpointError

# A key of a real state contains no NUL, so no key of the user equals the mark.
_MARK = "\0tensor"


def split(state: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return ``state`` with a mark in place of each tensor, and the tensors by name (``model/0.weight``).

    Raises:
        CheckpointError: two tensors have the same name, or a key is the mark.
    """
    tensors: dict[str, torch.Tensor] = {}

    def walk(value: Any, name: str) -> Any:
        if isinstance(value, torch.Tensor):
            if name in tensors:
                raise CheckpointError(f"{name}: two tensors of the state have this name")
            tensors[name] = value
            return {_MARK: name}
        if isinstance(value, dict):
            if _MARK in value:
                raise CheckpointError(f"{name}: the key {_MARK!r} cannot be saved")
            return _same_type(
                value, {key: walk(child, _below(name, key)) for key, child in value.items()}
            )
        if type(value) in (list, tuple):
            return type(value)(walk(child, _below(name, i)) for i, child in enumerate(value))
        return value

    return walk(state, ""), tensors


def join(skeleton: Any, tensors: Mapping[str, Any]) -> Any:
    """Return the state that :func:`split` took apart, with ``tensors`` in place; raises KeyError."""
    if isinstance(skeleton, dict):
        if skeleton.keys() == {_MARK}:
            return tensors[skeleton[_MARK]]
        return _same_type(skeleton, {key: join(child, tensors) for key, child in skeleton.items()})
    if type(skeleton) in (list, tuple):
        return type(skeleton)(join(child, tensors) for child in skeleton)
    return skeleton


def _same_type(mapping: dict[Any, Any], items: dict[Any, Any]) -> dict[Any, Any]:
    """Return ``items`` in a mapping of the type of ``mapping``."""
    # Pass a mapping: a Counter would count pairs (MultiStepLR keeps its milestones in a Counter).
    return items if type(mapping) is dict else type(mapping)(items)


def _below(name: str, key: object) -> str:
    return f"{name}/{key}" if name else str(key)
