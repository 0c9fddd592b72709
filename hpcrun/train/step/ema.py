"""An exponential moving average of the weights, beside them."""

import contextlib
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from hpcrun.checkpoint.state.names import named_parameters


class WeightAverage:
    """Averages of the trained parameters of a model, which start as these are now.

    Sharded parameters have sharded averages. Buffers and frozen parameters are the model's own.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        """``model``: as it is trained, wrapped or sharded. ``decay``: what stays of an average in a step."""
        trained = {
            name: parameter
            for name, parameter in named_parameters(model)
            if parameter.requires_grad and parameter.is_floating_point()
        }
        self._averages = {name: value.detach().clone() for name, value in trained.items()}
        # The tensors below are changed in place, by optimisers too: found once, they stay the right ones.
        self._own = [_local(value) for value in self._averages.values()]
        self._models = [_local(value) for value in trained.values()]
        self._lerp: Any = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]

    def update(self) -> None:
        """Take in the weights as they are after a step."""
        self._lerp(self._own, self._models, None)

    def restart(self, names: Collection[str]) -> None:
        """Let the averages of these names begin anew with the weights as they are."""
        with torch.no_grad():
            for name, own, model in zip(self._averages, self._own, self._models, strict=True):
                if name in names:
                    own.copy_(model)

    def tensors(self) -> dict[str, Tensor]:
        """The averages by the canonical names of their parameters: references, as a checkpoint takes them."""
        return dict(self._averages)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """For the block the model has the averages for weights; then it has its own again, to the bit."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        with torch.no_grad():
            # One after the other: no second copy of all weights is ever in memory.
            for own, model in zip(self._own, self._models, strict=True):
                kept = model.clone()
                model.copy_(own)
                own.copy_(kept)


def _local(value: Tensor) -> Tensor:
    """The part of a tensor that lies on this rank, for kernels that know no shards."""
    with torch.no_grad():
        return value.to_local() if isinstance(value, DTensor) else value.detach()
