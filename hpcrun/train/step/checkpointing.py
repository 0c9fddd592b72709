"""Save and load the checkpoints of a trainer: model, optimizer, schedule, loss scale, average, generators."""

import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hpcrun.checkpoint.outcome import Restored, SaveOutcome
from hpcrun.checkpoint.sharded.collective import RankGroup
from hpcrun.checkpoint.sharded.engine import CheckpointEngine
from hpcrun.checkpoint.sharded.host_staging import Staging
from hpcrun.checkpoint.sharded.restore import Template
from hpcrun.checkpoint.state import capture
from hpcrun.checkpoint.state.buffers import apply_buffers, capture_buffers
from hpcrun.checkpoint.storage.index import TensorEntry
from hpcrun.checkpoint.storage.retention import Retention, pruning
from hpcrun.checkpoint.storage.store import CheckpointStore
from hpcrun.device.accelerator import is_accelerator
from hpcrun.train.step.ema import WeightAverage
from hpcrun.train.step.gate import StepGate


class Checkpointing(ABC):
    """Mixin that saves and loads checkpoints of a trainer with the attributes below."""

    device: torch.device
    module: nn.Module
    model: nn.Module
    gate: StepGate
    _engines: dict[Path, CheckpointEngine]
    _begun: set[CheckpointEngine]

    @property
    @abstractmethod
    def optimizer(self) -> Optimizer:
        """The optimizer."""

    @property
    @abstractmethod
    def average(self) -> WeightAverage | None:
        """The average of the weights; None if the trainer keeps none."""

    @property
    @abstractmethod
    def scheduler(self) -> LRScheduler | None:
        """The learning-rate schedule; None if there is none."""

    def save_checkpoint(
        self,
        where: Path | str | CheckpointEngine,
        step: int,
        extra: Mapping[str, Any] | None = None,
        meta: Mapping[str, Any] | None = None,
    ) -> SaveOutcome:
        """Save everything that a restart after ``step`` steps needs, and wait for the commit. Collective.

        The files hold model, optimizer, schedule, loss scale, average and random generators.

        Args:
            where: a folder of checkpoints.
            step: number of finished steps.
            extra: your own plain data and tensors; :meth:`load_checkpoint` returns them.
            meta: plain JSON data, kept readable in the manifest.

        Returns:
            The outcome: committed or failed, the same on every rank, with sizes in bytes and times in
            seconds. A failed save raises nothing.

        Raises:
            CheckpointError: on all ranks, if the folder holds steps of another training, which
                :meth:`load_checkpoint` did not load.
            RuntimeError: the parallelism is FSDP, and ``wrap_model()`` was not called.
        """
        engine = self._engine(where)
        self.start_checkpoint(where, step, extra, meta)
        return engine.wait()[-1]

    def start_checkpoint(
        self,
        where: Path | str | CheckpointEngine,
        step: int,
        extra: Mapping[str, Any] | None = None,
        meta: Mapping[str, Any] | None = None,
        own: Mapping[str, Any] | None = None,
    ) -> None:
        """Start :meth:`save_checkpoint` asynchronously: a thread writes while training continues. Collective.

        In your own loop :class:`hpcrun.Checkpointer` does this, and reports the outcome.

        Args:
            where: a folder of checkpoints, or an engine made for one, which reports the outcome.
            step: number of finished steps.
            extra: your own plain data and tensors; :meth:`load_checkpoint` returns them.
            meta: plain JSON data, kept readable in the manifest.
            own: plain data of this rank only, returned in the ``own`` of :meth:`load_checkpoint`.

        Raises:
            CheckpointError: as for :meth:`save_checkpoint`.
        """
        engine = self._engine(where)
        if engine is not where and engine not in self._begun:
            engine.require_no_steps("load_checkpoint()")
            self._begun.add(engine)
        # First apply the last step's result to the schedule: the optimizer holds its learning rate.
        self.gate.resolve_pending()
        shared = capture.capture_shared(
            self.model,
            self.optimizer,
            scaler=self.gate,
            scheduler=self.scheduler,
            extra=dict(extra or {}),
        )
        if self.average is not None:
            shared["ema"] = self.average.tensors()
        engine.start(
            step,
            shared,
            {**(own or {}), **self._capture_own()},
            dict(meta or {}),
            capture.alike(self.model),
        )

    def load_checkpoint(
        self, where: Path | str | CheckpointEngine, skip: Collection[int] = ()
    ) -> Restored | None:
        """Restore the newest valid checkpoint in place; return None if there is none. Collective.

        This also restores the random generators. Make datasets, loaders and their iterators before the
        call, or give each loader its own generator.

        Args:
            where: a folder of checkpoints, or an engine made for one.
            skip: steps to ignore.

        Returns:
            ``step`` (the number of finished steps), ``shared["extra"]`` (your data), ``meta``, and ``notes``
            on damage and on changes.

        Raises:
            CheckpointError: checkpoints exist but none is valid, or the newest does not fit the model.
            RuntimeError: the parallelism is FSDP, and ``wrap_model()`` was not called.
        """
        engine = self._engine(where)
        restored = engine.restore(self._template(), skip)
        self._begun.add(engine)
        if restored is not None:
            parts = {"scaler": self.gate, "scheduler": self.scheduler}
            capture.apply_shared(restored.shared, self.model, self.optimizer, **parts)
            ignored = capture.left_out(restored.shared, **parts)
            restored = replace(restored, notes=(*restored.notes, *ignored))
            fresh = self._restart_averages(restored.shared.get("ema", {}))
            if fresh is not None:
                restored = replace(restored, notes=(*restored.notes, fresh))
            if restored.own is not None:
                notes = self._apply_own(restored.own)
                restored = replace(restored, notes=(*restored.notes, *notes))
            lost = self._restore_compression(restored.own)
            if lost is not None:
                restored = replace(restored, notes=(*restored.notes, lost))
        return restored

    def _restart_averages(self, saved: Collection[str]) -> str | None:
        """Start averages that the checkpoint lacks from the current weights; return a note, or None."""
        lacking = set() if self.average is None else self.average.tensors().keys() - set(saved)
        if self.average is None or not lacking:
            return None
        self.average.restart(lacking)
        name = min(lacking) if saved else "the weights"
        return (
            f"the checkpoint has no average of {name}; the average starts from the loaded weights"
        )

    def _template(self) -> Template:
        """Return the loading template: tensors load in place, also the averages."""
        base, average = capture.template(self.model, self.optimizer), self.average

        def tensors(entries: Mapping[str, TensorEntry], skeleton: Any) -> dict[str, Any]:
            wanted = average is not None and any(name.startswith("ema/") for name in entries)
            found = base(entries, skeleton)
            return found | ({"ema": average.tensors()} if average and wanted else {})

        return tensors

    @property
    def _buffers_differ(self) -> bool:
        """True if the ranks keep different buffers between steps; False if rank 0's buffers are used."""
        return False

    def _capture_own(self) -> dict[str, Any]:
        own = capture.capture_rank()
        if self.device.type == "cpu":
            own["threads"] = torch.get_num_threads()
        if self._buffers_differ:
            own["buffers"] = capture_buffers(self.module)
        return own

    def _apply_own(self, own: dict[str, Any]) -> list[str]:
        # A checkpoint of another parallelism may hold buffers that are identical on all ranks.
        if self._buffers_differ and "buffers" in own:
            apply_buffers(own["buffers"], self.module)
        notes = capture.apply_rank(own)
        threads = self._keep_threads(own.get("threads"))
        return notes if threads is None else [*notes, threads]

    def _keep_threads(self, saved: int | None) -> str | None:
        """Use as many threads as the checkpoint's rank did; return a note if that changes something.

        On the CPU the number of threads decides how a sum is split, and so its last bits. With
        deterministic algorithms, another node or another number of ranks must not change the bits.
        """
        here = torch.get_num_threads()
        wanted = torch.are_deterministic_algorithms_enabled()
        if not wanted or self.device.type != "cpu" or saved in (None, here):
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

    def _restore_compression(self, own: dict[str, Any] | None) -> str | None:
        """Restore the memory of gradient compression; return a note if it is lost."""
        return None

    def _engine(self, where: Path | str | CheckpointEngine) -> CheckpointEngine:
        if isinstance(where, CheckpointEngine):
            return where
        folder = Path(where)
        if folder not in self._engines:
            self._engines[folder] = self._make_engine(folder)
        return self._engines[folder]

    def _make_engine(self, folder: Path) -> CheckpointEngine:
        return folder_engine(
            folder, owner="0-0", rank=0, world_size=1, group=None, device=self.device
        )


def folder_engine(
    folder: Path,
    *,
    owner: str,
    rank: int,
    world_size: int,
    group: Any,
    device: torch.device | None = None,
) -> CheckpointEngine:
    """Make an engine for a folder in your own loop, for state on ``device``. Collective."""
    # Without a run directory, two processes may have the same owner name.
    store = CheckpointStore(folder, f"{owner}-{secrets.token_hex(3)}")
    together = RankGroup(rank, world_size, group)
    return CheckpointEngine(
        store,
        rank=rank,
        world_size=world_size,
        group=group,
        still_mine=_always_owner,
        after_commit=pruning(store, Retention()),
        staging=Staging(
            ranks_on_host=together.on_this_host(),
            pinned=device is not None and is_accelerator(device),
        ),
    )


def available_cpus() -> int:
    """Return the number of CPUs that this process may run on."""
    return len(os.sched_getaffinity(0))


def _always_owner() -> None:
    """Raise nothing: without a run directory there is no newer attempt that could own the folder."""
