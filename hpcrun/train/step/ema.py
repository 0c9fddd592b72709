"""Exponential moving average of the weights."""

import contextlib
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from hpcrun.checkpoint.state.names import named_parameters


class WeightAverage:
    """Averages of the model's trained parameters; they start from the current values.

    Sharded parameters have sharded averages. Buffers and frozen parameters are not averaged.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        """``model``: wrapped or sharded as trained. ``decay``: weight of the old average in each update."""
        trained = {
            name: parameter
            for name, parameter in named_parameters(model)
            if parameter.requires_grad and parameter.is_floating_point()
        }
        self._averages = {name: value.detach().clone() for name, value in trained.items()}
        # Optimizers change these tensors in place, so the references stay valid.
        self._own = [_local(value) for value in self._averages.values()]
        self._models = [_local(value) for value in trained.values()]
        self._lerp: Any = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]

    def update(self) -> None:
        """Update the averages with the current weights."""
        self._lerp(self._own, self._models, None)

    def restart(self, names: Collection[str]) -> None:
        """Reset the averages of these parameters to the current weights."""
        with torch.no_grad():
            for name, own, model in zip(self._averages, self._own, self._models, strict=True):
                if name in names:
                    own.copy_(model)

    def tensors(self) -> dict[str, Tensor]:
        """Return references to the averages by canonical parameter name, for a checkpoint."""
        return dict(self._averages)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Swap the averages into the model for the block, then restore the exact weights."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        with torch.no_grad():
            # One tensor at a time, so that no second copy of all weights is in memory.
            for own, model in zip(self._own, self._models, strict=True):
                kept = model.clone()
                model.copy_(own)
                own.copy_(kept)


def _local(value: Tensor) -> Tensor:
    """Return this rank's shard of a tensor, for kernels that do not accept DTensor."""
    with torch.no_grad():
        return value.to_local() if isinstance(value, DTensor) else value.detach()
