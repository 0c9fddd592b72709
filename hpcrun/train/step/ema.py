"""Exponential moving average of the weights."""

import contextlib
import os
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from hpcrun.checkpoint.state.training import RankPart
from hpcrun.checkpoint.state.tree import named_parameters


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


def use_threads(saved: int | None) -> str | None:
    """Use as many CPU threads as the checkpoint's rank did; return a note if that changes something.

    The number of threads decides how a sum is split, and so its last bits. With deterministic algorithms,
    another node or another number of ranks must not change the bits.
    """
    here = torch.get_num_threads()
    if not torch.are_deterministic_algorithms_enabled() or saved in (None, here):
        return None
    cpus = available_cpus()
    if saved > cpus:
        return (
            f"CPU threads per rank: {here}; the checkpoint was saved with {saved}, but there are only "
            f"{cpus} CPUs: the last bits may differ"
        )
    torch.set_num_threads(saved)
    return (
        f"CPU threads per rank: {saved}, as in the checkpoint, for identical bits; "
        f"train.deterministic=false uses {here}"
    )


THREADS = RankPart(torch.get_num_threads, use_threads)
"""The number of CPU threads of a rank, for training on the CPU."""


def available_cpus() -> int:
    """Return the number of CPUs that this process may run on."""
    return len(os.sched_getaffinity(0))
