"""Make an unsharded copy of a sharded model, for code that needs all weights in one place."""

import copy
from typing import Any

import torch
from torch import Tensor, nn


def without_weights(module: nn.Module) -> nn.Module:
    """Copy ``module`` with parameters on the meta device; call it before sharding or wrapping."""
    memo: dict[int, Any] = {
        id(parameter): nn.Parameter(
            torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad
        )
        for parameter in module.parameters()
    }
    return copy.deepcopy(module, memo)


def with_weights(shape: nn.Module, values: dict[str, Tensor]) -> nn.Module:
    """Copy the model of ``without_weights`` with the tensors of ``values``, a full state dict."""
    memo: dict[int, Any] = {
        id(parameter): nn.Parameter(values[name], requires_grad=parameter.requires_grad)
        for name, parameter in shape.named_parameters()
    }
    plain = copy.deepcopy(shape, memo)
    plain.load_state_dict(
        {name: values[name] for name, _ in plain.named_buffers() if name in values}, strict=False
    )
    return plain
