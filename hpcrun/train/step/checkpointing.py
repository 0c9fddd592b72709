"""The trainers' checkpoints: what of a trainer is saved, and how it comes back."""

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
from hpcrun.checkpoint.sharded.collective import Together
from hpcrun.checkpoint.sharded.engine import CheckpointEngine
from hpcrun.checkpoint.sharded.host_staging import Staging
from hpcrun.checkpoint.sharded.restore import Template
from hpcrun.checkpoint.state import capture
from hpcrun.checkpoint.state.buffers import apply_buffers, capture_buffers
from hpcrun.checkpoint.storage.index import TensorEntry
from hpcrun.checkpoint.storage.retention import Retention, tidying
from hpcrun.checkpoint.storage.store import CheckpointStore
from hpcrun.train.step.ema import WeightAverage
from hpcrun.train.step.gate import StepGate


class Checkpointing(ABC):
    """Saving and loading for a trainer, which has the attributes below; one rank's engine unless told."""

    device: torch.device
    module: nn.Module
    model: nn.Module
    gate: StepGate
    _engines: dict[Path, CheckpointEngine]
    _begun: set[CheckpointEngine]

    @property
    @abstractmethod
    def optimizer(self) -> Optimizer:
        """The optimiser."""

    @property
    @abstractmethod
    def average(self) -> WeightAverage | None:
        """The average of the weights, if one is kept."""

    @property
    @abstractmethod
    def scheduler(self) -> LRScheduler | None:
        """The learning-rate schedule, if there is one."""

    def save_checkpoint(
        self,
        where: Path | str | CheckpointEngine,
        step: int,
        extra: Mapping[str, Any] | None = None,
        meta: Mapping[str, Any] | None = None,
    ) -> SaveOutcome:
        """Commit everything that a restart at ``step`` needs, and wait for it. Collective.

        Args:
            where: a folder of checkpoints, or an engine made for one.
            extra: plain data and tensors of your own, given back by :meth:`load_checkpoint`.
            meta: plain data kept readable in the manifest.

        Returns:
            Whether it was committed; a failed save is told, on every rank alike, and not raised.

        Raises:
            CheckpointError: the folder holds steps of another training, which :meth:`load_checkpoint`
                did not load. On all ranks.
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
        """As :meth:`save_checkpoint`, but training may go on while it is written: the engine tells.

        ``own``: plain data of this rank alone, given back in the ``own`` of :meth:`load_checkpoint`.
        """
        engine = self._engine(where)
        if engine is not where and engine not in self._begun:
            engine.require_no_steps("load_checkpoint()")
            self._begun.add(engine)
        # First what the schedule still has to learn of the last step: the optimiser holds its rate.
        self.gate.settle()
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
        """Restore the newest valid checkpoint, or return None when there is none. Collective.

        ``skip``: steps not to consider.

        The random generators are restored with it: make datasets, loaders and their iterators before,
        or give the loaders a generator of their own.

        Raises:
            CheckpointError: what was read does not fit this model.
        """
        engine = self._engine(where)
        restored = engine.restore(self._template(), skip)
        self._begun.add(engine)
        if restored is not None:
            parts = {"scaler": self.gate, "scheduler": self.scheduler}
            capture.apply_shared(restored.shared, self.model, self.optimizer, **parts)
            alone = capture.left_out(restored.shared, **parts)
            restored = replace(restored, notes=(*restored.notes, *alone))
            fresh = self._restart_averages(restored.shared.get("ema", {}))
            if fresh is not None:
                restored = replace(restored, notes=(*restored.notes, fresh))
            if restored.own is not None:
                told = self._apply_own(restored.own)
                restored = replace(restored, notes=(*restored.notes, *told))
            lost = self._restore_compression(restored.own)
            if lost is not None:
                restored = replace(restored, notes=(*restored.notes, lost))
        return restored

    def _restart_averages(self, saved: Collection[str]) -> str | None:
        """Begin averages that the checkpoint lacks with its weights; a line if there are any."""
        lacking = set() if self.average is None else self.average.tensors().keys() - set(saved)
        if self.average is None or not lacking:
            return None
        self.average.restart(lacking)
        which = min(lacking) if saved else "the weights"
        return f"the checkpoint has no average of {which}: it begins with its weights"

    def _template(self) -> Template:
        """Where to load a checkpoint: in place, the averages as well."""
        base, average = capture.template(self.model, self.optimizer), self.average

        def tensors(entries: Mapping[str, TensorEntry], skeleton: Any) -> dict[str, Any]:
            wanted = average is not None and any(name.startswith("ema/") for name in entries)
            found = base(entries, skeleton)
            return found | ({"ema": average.tensors()} if average and wanted else {})

        return tensors

    @property
    def _buffers_differ(self) -> bool:
        """Whether each rank keeps buffers of its own from step to step (otherwise rank 0's count)."""
        return False

    def _capture_own(self) -> dict[str, Any]:
        own = capture.capture_rank()
        if self.device.type == "cpu":
            own["threads"] = torch.get_num_threads()
        if self._buffers_differ:
            own["buffers"] = capture_buffers(self.module)
        return own

    def _apply_own(self, own: dict[str, Any]) -> list[str]:
        # Saved by another way of sharing the work, the buffers may be alike on all ranks.
        if self._buffers_differ and "buffers" in own:
            apply_buffers(own["buffers"], self.module)
        notes = capture.apply_rank(own)
        threads = self._keep_threads(own.get("threads"))
        return notes if threads is None else [*notes, threads]

    def _keep_threads(self, saved: int | None) -> str | None:
        """Compute with as many threads as the checkpoint's rank; a line where that is news.

        On the CPU they decide where a sum is cut in parts, and with that its last bits: another node,
        or another number of ranks on it, must not, where equal bits are asked of torch.
        """
        here = torch.get_num_threads()
        wanted = torch.are_deterministic_algorithms_enabled()
        if not wanted or self.device.type != "cpu" or saved in (None, here):
            return None
        cpus = available_cpus()
        if saved > cpus:
            return (
                f"threads of a rank: {here}, and {saved} when it was saved, for which {cpus} CPUs are too "
                "few: the last bits may differ"
            )
        torch.set_num_threads(saved)
        return (
            f"threads of a rank: {saved}, as when it was saved, for the same bits; {here}, as this start "
            "would have it, with train.deterministic=false"
        )

    def _restore_compression(self, own: dict[str, Any] | None) -> str | None:
        """Give the gradients' compression its memory back; a line if that is lost."""
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
    """An engine for a folder in a loop of one's own, whose state is on ``device``. Collective."""
    # Without a run directory nothing keeps two processes apart that call themselves alike.
    store = CheckpointStore(folder, f"{owner}-{secrets.token_hex(3)}")
    together = Together(rank, world_size, group)
    return CheckpointEngine(
        store,
        rank=rank,
        world_size=world_size,
        group=group,
        still_mine=_nobody_else,
        tidy=tidying(store, Retention()),
        staging=Staging(
            ranks_on_host=together.on_this_host(),
            pinned=device is not None and device.type == "cuda",
        ),
    )


def available_cpus() -> int:
    """How many CPUs this process may run on."""
    return len(os.sched_getaffinity(0))


def _nobody_else() -> None:
    """In a loop of one's own there is no run directory that could tell of a newer incarnation."""
