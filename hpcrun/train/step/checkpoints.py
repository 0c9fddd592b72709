"""The checkpoints of a trainer: folders of exact checkpoints, and single files of torch."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hpcrun.checkpoint.folder import folder_engine, folder_store
from hpcrun.checkpoint.outcome import Restored, SaveOutcome
from hpcrun.checkpoint.saver import SaveContent, Saver
from hpcrun.checkpoint.sharded.engine import CheckpointEngine
from hpcrun.checkpoint.state.training import TrainingState
from hpcrun.devices.accelerator import is_accelerator
from hpcrun.errors import UserError
from hpcrun.ranks.collective import Ranks
from hpcrun.train.parallel.strategies import Strategy
from hpcrun.train.step import checkpoint_file
from hpcrun.train.step.accumulation import Accumulation
from hpcrun.train.step.gate import StepGate


class TrainerCheckpoints(ABC):
    """Base class of the trainers: it saves and restores their state."""

    device: torch.device
    model: nn.Module
    gate: StepGate
    accumulation: Accumulation
    _strategy: Strategy
    _engines: dict[Path, CheckpointEngine]

    @property
    def ranks(self) -> int:
        """Number of ranks in a step."""
        return 1

    @property
    def steps(self) -> int:
        """Number of optimizer steps so far, with skipped ones; a checkpoint restores it."""
        return self.gate.steps + self.gate.pending

    @property
    def is_main_process(self) -> bool:
        """True on rank 0."""
        return True

    def save_checkpoint(
        self,
        where: Path | str | CheckpointEngine,
        step: int | None = None,
        extra: Mapping[str, Any] | None = None,
        meta: Mapping[str, Any] | None = None,
        *,
        include_optimizer: bool = True,
        metadata: Mapping[str, Any] | None = None,
        rank: int = 0,
    ) -> SaveOutcome:
        """Save everything that a restart after ``step`` steps needs.

        A folder is the exact form, and collective: it holds model, optimizer, schedule, loss scale, average,
        random generators, and gradients between the calls of an accumulation. The call waits for the commit.

        A path that ends in ``.pt`` or ``.pth`` is one file, which rank 0 writes, and which
        ``torch.load(path, map_location="cpu", weights_only=True)`` reads: ``["model_state_dict"]`` loads into
        the plain model. It is not collective: other ranks return without waiting. It lacks the random
        generators of the other ranks. See :mod:`hpcrun.train.step.checkpoint_file`.

        Args:
            where: a folder of checkpoints, or a file.
            step: number of finished steps; None: :attr:`steps`.
            extra: your own plain data and tensors; :meth:`load_checkpoint` returns them.
            meta: plain JSON data, kept readable in the manifest of a folder.
            include_optimizer: file: with the optimizer and the schedule.
            metadata: other name of ``meta``. In a file also tensors.
            rank: the rank that writes a file; only 0 is possible.

        Returns:
            The outcome, in bytes and seconds. Of a folder, it is the same on every rank. A failed save
            raises nothing.

        Raises:
            CheckpointError: on all ranks, if the folder holds steps of another training, which
                :meth:`load_checkpoint` did not load.
            UserError: the path has the suffix of another file, such as ``.ckpt``. Or a file cannot hold the
                state: shards of FSDP, the state of a communication hook, or gradients between the calls of an
                accumulation. A folder without the optimizer. Or FSDP between the calls of an accumulation.
            RuntimeError: the parallelism is FSDP, and ``wrap_model()`` was not called.
        """
        step = self.steps if step is None else step
        described = checkpoint_file.numbers({**(meta or {}), **(metadata or {})})
        if checkpoint_file.is_file_form(where):
            assert not isinstance(where, CheckpointEngine)
            return self._save_file(Path(where), step, extra, described, include_optimizer, rank)
        if not include_optimizer:
            raise UserError(
                f"{where}: a folder of checkpoints always holds the optimizer; for weights only, save a file "
                "(.pth), or use hpcrun export"
            )
        return self.start_checkpoint(where, step, extra, described).wait()[-1]

    def start_checkpoint(
        self,
        where: Path | str | CheckpointEngine,
        step: int,
        extra: Mapping[str, Any] | None = None,
        meta: Mapping[str, Any] | None = None,
        own: Mapping[str, Any] | None = None,
        *,
        disk: bool = True,
        memory: bool = True,
    ) -> CheckpointEngine:
        """Start :meth:`save_checkpoint` asynchronously: a thread writes while training continues. Collective.

        In your own loop :class:`hpcrun.Checkpointer` does this, and reports the outcome. ``step``, ``extra``,
        ``meta`` and the errors are as for :meth:`save_checkpoint`.

        Args:
            where: a folder of checkpoints, or an engine made for one.
            own: plain data of this rank only, returned in the ``own`` of :meth:`load_checkpoint`.
            disk: as for :meth:`CheckpointEngine.start`.
            memory: as for :meth:`CheckpointEngine.start`.

        Returns:
            The engine, which reports the outcome.
        """
        engine = self._engine(where)
        content = SaveContent(dict(extra or {}), dict(meta or {}), dict(own or {}))
        saver_of(self, engine).begin(step, lambda _: content, disk=disk, memory=memory)
        return engine

    def load_checkpoint(
        self, where: Path | str | CheckpointEngine, skip: Collection[int] = ()
    ) -> Restored | None:
        """Restore the newest valid checkpoint of a folder, or a file, in place. Collective.

        Every rank reads a file; its tensors load on the CPU first. A folder also restores the random
        generators. Make datasets, loaders and their iterators before the call, or give each loader its own
        generator.

        Args:
            where: a folder of checkpoints, an engine made for one, or a file (``.pt``, ``.pth``).
            skip: steps to ignore in a folder.

        Returns:
            ``step`` (finished steps), ``shared["extra"]`` (your data), ``meta``, and ``notes`` on changes;
            None if a folder has no checkpoint.

        Raises:
            CheckpointError: checkpoints exist but none is valid, or the newest does not fit the model; or
                the file is missing or damaged.
            UserError: a file, and the parallelism is FSDP.
            RuntimeError: the parallelism is FSDP, and ``wrap_model()`` was not called.
        """
        if checkpoint_file.is_file_form(where):
            assert not isinstance(where, CheckpointEngine)
            return self._load_file(Path(where))
        restored = saver_of(self, self._engine(where)).restore(skip=skip)
        if restored is None:
            return None
        if "steps" not in (restored.shared.get("scaler") or {}):
            # Another program's checkpoint has no count of steps.
            self._set_steps(restored.step)
        return restored

    def _save_file(
        self,
        path: Path,
        step: int,
        extra: Mapping[str, Any] | None,
        metadata: Mapping[str, Any],
        include_optimizer: bool,
        rank: int,
    ) -> SaveOutcome:
        if rank and self.is_main_process:
            raise UserError(f"{path}: rank={rank}, but rank 0 writes a checkpoint file; omit rank")
        checkpoint_file.require_file_form(self.model, sharded=self._strategy.replaces_parameters)
        self.accumulation.require_none("a checkpoint file")
        if not self.is_main_process:
            return SaveOutcome(True, step, path, notes=("rank 0 writes the file",))
        return checkpoint_file.write_file(
            path,
            self._state(),
            step,
            ranks=self.ranks,
            include_optimizer=include_optimizer,
            metadata=metadata,
            extra=extra,
        )

    def _load_file(self, path: Path) -> Restored:
        checkpoint_file.require_file_form(self.model, sharded=self._strategy.replaces_parameters)
        state = self._state()

        def load() -> Restored:
            content = checkpoint_file.read_file(path)
            return checkpoint_file.apply_file(
                path, content, state, ranks=self.ranks, advance=self._set_steps
            )

        restored = self._file_ranks().together(load)
        self.accumulation.restart()
        return restored

    def _set_steps(self, steps: int) -> None:
        self.gate.steps = steps

    def _file_ranks(self) -> Ranks:
        """Return the ranks that load a file together."""
        return Ranks()

    def _engine(self, where: Path | str | CheckpointEngine) -> CheckpointEngine:
        """Return the engine of a folder; the first call for a folder is collective."""
        if isinstance(where, CheckpointEngine):
            return where
        folder = Path(where)
        if folder not in self._engines:
            self._engines[folder] = folder_engine(
                folder_store(folder), self._checkpoint_ranks(), pinned=is_accelerator(self.device)
            )
        return self._engines[folder]

    @abstractmethod
    def _state(self) -> TrainingState:
        """Return the parts of the training."""

    def _checkpoint_ranks(self) -> Ranks:
        """Return the ranks that save together. Collective at the first call."""
        return Ranks()


def saver_of(trainer: TrainerCheckpoints, engine: CheckpointEngine, **options: Any) -> Saver:
    """Return a saver of a trainer's state.

    Args:
        trainer: its parts are read at each save and restore.
        engine: made for a folder of checkpoints.
        options: as for :class:`Saver`.
    """
    return Saver(engine, trainer._state, "load_checkpoint()", **options)
