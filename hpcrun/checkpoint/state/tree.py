"""A nested state taken apart into named tensors and the plain rest, and put together again.

Tensors go to disk as raw bytes, each under a name that does not depend on who holds which part of it;
what is left is small, and plain enough for ``torch.load(weights_only=True)``.
"""

from collections.abc import Mapping
from typing import Any

import torch

from hpcrun.checkpoint.storage.errors import CheckpointError

# No key of a real state contains NUL, so that nothing of the user's can be taken for a mark.
_MARK = "\0tensor"


def split(state: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """``state`` with a mark in the place of each tensor, and the tensors by name (``model/0.weight``).

    Raises:
        CheckpointError: two tensors would have one name, or a key is the mark.
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
            return _alike(
                value, {key: walk(child, _below(name, key)) for key, child in value.items()}
            )
        if type(value) in (list, tuple):
            return type(value)(walk(child, _below(name, i)) for i, child in enumerate(value))
        return value

    return walk(state, ""), tensors


def join(skeleton: Any, tensors: Mapping[str, Any]) -> Any:
    """The state that :func:`split` took apart, with ``tensors`` in their places; raises KeyError."""
    if isinstance(skeleton, dict):
        if skeleton.keys() == {_MARK}:
            return tensors[skeleton[_MARK]]
        return _alike(skeleton, {key: join(child, tensors) for key, child in skeleton.items()})
    if type(skeleton) in (list, tuple):
        return type(skeleton)(join(child, tensors) for child in skeleton)
    return skeleton


def _alike(mapping: dict[Any, Any], items: dict[Any, Any]) -> dict[Any, Any]:
    """``items`` in a mapping of the kind of ``mapping``."""
    # From a mapping, not from pairs, which a Counter (MultiStepLR keeps its milestones in one) would count.
    return items if type(mapping) is dict else type(mapping)(items)


def _below(name: str, key: object) -> str:
    return f"{name}/{key}" if name else str(key)
