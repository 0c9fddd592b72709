"""A plain copy of a model whose weights lie in shards, for what needs all of them in one place."""

import copy
from typing import Any

import torch
from torch import Tensor, nn


def hollow(module: nn.Module) -> nn.Module:
    """A copy of ``module`` without memory for parameters, taken before it is sharded or wrapped."""
    memo: dict[int, Any] = {
        id(parameter): nn.Parameter(
            torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad
        )
        for parameter in module.parameters()
    }
    return copy.deepcopy(module, memo)


def filled(shape: nn.Module, values: dict[str, Tensor]) -> nn.Module:
    """A copy of the ``hollow`` model with ``values``: a whole state dict, whose tensors it takes over."""
    memo: dict[int, Any] = {
        id(parameter): nn.Parameter(values[name], requires_grad=parameter.requires_grad)
        for name, parameter in shape.named_parameters()
    }
    plain = copy.deepcopy(shape, memo)
    plain.load_state_dict(
        {name: values[name] for name, _ in plain.named_buffers() if name in values}, strict=False
    )
    return plain
