"""Exponential moving average of the weights."""

import contextlib
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from hpcrun.checkpoint.folder import folder_engine, folder_store
from hpcrun.checkpoint.outcome import Restored
from hpcrun.checkpoint.sharded.engine import CheckpointEngine
from hpcrun.checkpoint.state.training import RankPart, TrainingState
from hpcrun.checkpoint.state.tree import named_parameters
from hpcrun.devices.accelerator import is_accelerator
from hpcrun.ranks.collective import Ranks


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


class TrainerCheckpoints:
    """Saves and restores the state of a trainer in folders."""

    def __init__(
        self,
        state: Callable[[], TrainingState],
        ranks: Callable[[], Ranks],
        device: torch.device,
    ) -> None:
        self._state, self._ranks = state, ranks
        self._pinned = is_accelerator(device)
        self._engines: dict[Path, CheckpointEngine] = {}

    def engine(self, where: Path | str | CheckpointEngine) -> CheckpointEngine:
        """Return the engine of a folder; the first call for a folder is collective."""
        if isinstance(where, CheckpointEngine):
            return where
        folder = Path(where)
        if folder not in self._engines:
            self._engines[folder] = folder_engine(
                folder_store(folder), self._ranks(), pinned=self._pinned
            )
        return self._engines[folder]

    def start(
        self,
        where: Path | str | CheckpointEngine,
        step: int,
        extra: Mapping[str, Any] | None,
        meta: Mapping[str, Any] | None,
        own: Mapping[str, Any] | None = None,
        *,
        disk: bool = True,
        memory: bool = True,
    ) -> CheckpointEngine:
        """Start a save as :meth:`AMPTrainer.start_checkpoint`, and return its engine.

        ``disk`` and ``memory``: where the snapshot is kept; see :meth:`CheckpointEngine.start`.
        """
        engine = self.engine(where)
        engine.require_restored("load_checkpoint()")
        state = self._state()
        shared, rank = state.capture(dict(extra or {}))
        engine.start(
            step,
            shared,
            {**(own or {}), **rank},
            dict(meta or {}),
            state.alike(),
            disk=disk,
            memory=memory,
        )
        return engine

    def load(self, where: Path | str | CheckpointEngine, skip: Collection[int]) -> Restored | None:
        """Restore as :meth:`AMPTrainer.load_checkpoint`."""
        engine, state = self.engine(where), self._state()
        restored = engine.restore(state.template(), skip)
        return None if restored is None else state.restore(restored)


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
