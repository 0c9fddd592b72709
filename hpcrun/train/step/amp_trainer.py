"""AMPTrainer: optimizer steps on one device, with mixed precision, accumulation and clipping."""

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hpcrun.checkpoint.folder import folder_engine, folder_store
from hpcrun.checkpoint.outcome import Restored, SaveOutcome
from hpcrun.checkpoint.sharded.engine import CheckpointEngine
from hpcrun.checkpoint.state.training import RankPart, TrainingState
from hpcrun.config import AMPConfig
from hpcrun.devices.accelerator import default_device, is_accelerator
from hpcrun.ranks.collective import Ranks
from hpcrun.train.data.micro_batches import MicroBatches
from hpcrun.train.parallel.strategies import NOTHING, Strategy
from hpcrun.train.step.ema import THREADS, WeightAverage
from hpcrun.train.step.gate import StepGate, trained_by
from hpcrun.train.step.precision import (
    LossFunction,
    StepResult,
    autocast_dtype,
    choose_matmul,
    to_device,
)
from hpcrun.train.step.weighting import (
    Weight,
    loss_factors,
    require_makers,
    require_plain_step,
    weighted,
)


class AMPTrainer:
    """Mixed-precision training steps with gradient accumulation, clipping and loss scaling, on one device.

    Weights and optimizer state keep their dtype, usually float32; autocast casts operations of the forward
    pass. Sources: ``torch.amp``; Micikevicius et al. 2018, arXiv:1710.03740.

    Attributes:
        device: the device of the weights.
        module: the model without a wrapper.
        model: the module for forward passes; the same as ``module`` on one device.
        amp: the precision.
        clip_norm: maximum global gradient norm, or None.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Callable[[nn.Module], Optimizer],
        *,
        amp: AMPConfig | None = None,
        clip_norm: float | None = None,
        scheduler: Callable[[Optimizer], LRScheduler] | None = None,
        device: torch.device | str | None = None,
        ema: float | None = None,
    ) -> None:
        """Move ``model`` to ``device``.

        Args:
            model: the model to train.
            optimizer: the optimizer, or a function that makes it from the wrapped model. FSDP needs the
                function, because it replaces the parameters. Its ``step()`` takes no closure.
            amp: precision and loss scaling; None: float32.
            clip_norm: maximum global gradient norm, as ``torch.nn.utils.clip_grad_norm_``; None: no clipping.
            scheduler: function that makes the learning-rate schedule from the optimizer. Its ``step()``
                takes no metric and is called after every step that was not skipped.
            device: where to train; None: the current GPU, or the CPU.
            ema: decay of an exponential moving average of the weights (``torch.optim.swa_utils``), updated
                after every step that was not skipped.

        Raises:
            ValueError: the optimizer's ``step()`` needs an argument, or ``scheduler`` is an object instead of
                a function. Objects that a function makes are checked when they are made.
        """
        if device is None:
            device = default_device()
        self.device = torch.device(device)
        self.amp = amp or AMPConfig()
        self._strategy = self._choose_strategy()
        require_makers(optimizer, scheduler, replaced=self._strategy.replaces_parameters)
        self.module = self._strategy.place(model, self.device)
        self.model: nn.Module = self.module
        self.clip_norm = clip_norm
        choose_matmul(self.amp, self.device)
        self.gate = StepGate(self.amp, self.device, self._after_step)
        self._make_optimizer = optimizer
        self._make_scheduler = scheduler
        self._optimizer: Optimizer | None = None
        self._scheduler: LRScheduler | None = None
        self._ema = ema
        self._average: WeightAverage | None = None
        self._weights: Sequence[Weight] = ()
        self._engines: dict[Path, CheckpointEngine] = {}

    @property
    def _replays_graphs(self) -> bool:
        """True if the compiled model captures CUDA graphs, so that its outputs live in reused memory."""
        return False

    @property
    def is_distributed(self) -> bool:
        """True if gradients are averaged over ranks."""
        return False

    @property
    def is_main_process(self) -> bool:
        """True on rank 0."""
        return True

    @property
    def forward_is_collective(self) -> bool:
        """True if a forward pass waits for the other ranks' forward passes even without gradients."""
        return self._strategy.collective_forward

    def after_evaluation(self) -> None:
        """Clean up after forward passes through ``module`` that no backward pass follows.

        With FSDP this frees gathered weights, which would not follow a change of the shards.
        """
        self._strategy.after_evaluation(self.module)

    def whole_module(self) -> nn.Module | None:
        """Return the unwrapped model with all its weights; on ranks other than 0 it may be None. Collective.

        With FSDP the model is a copy: on the device if it fits there, otherwise on the CPU.

        Raises:
            RuntimeError: the parallelism is FSDP, and ``wrap_model()`` was not called.
        """
        self._require_final_parameters()
        return self._strategy.whole(self.module, self.device)

    @property
    def _ranks(self) -> int:
        """Number of ranks in a step."""
        return 1

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer. The first access makes it from the wrapped model.

        Raises:
            RuntimeError: the parallelism is FSDP, and ``wrap_model()`` was not called.
            ValueError: its ``step()`` needs an argument.
        """
        if self._optimizer is None:
            self._require_final_parameters()
            # After a pass without a backward pass, the parameters are gathered weights instead of shards.
            self.after_evaluation()
            made = self._make_optimizer
            optimizer = made if isinstance(made, Optimizer) else made(self.model)
            require_plain_step(optimizer)
            self._optimizer = optimizer
            if self._ema is not None:
                self._average = WeightAverage(self.model, self._ema)
        return self._optimizer

    @property
    def average(self) -> WeightAverage | None:
        """Moving average of the weights after all steps so far; None without ``ema``."""
        if self._ema is None:
            return None
        _ = self.optimizer
        self.gate.resolve_pending()
        return self._average

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Swap the averaged weights into the model for the block; without ``ema`` change nothing."""
        average = self.average
        # The swap changes shards, so no weights may stay gathered before and after the block.
        self.after_evaluation()
        try:
            with NOTHING if average is None else average.in_place():
                yield
        finally:
            self.after_evaluation()

    @property
    def scheduler(self) -> LRScheduler | None:
        """The learning-rate schedule, up to date with the last step; None without a schedule.

        Raises:
            ValueError: its ``step()`` needs an argument, such as a metric.
        """
        if self._scheduler is None and self._make_scheduler is not None:
            scheduler = self._make_scheduler(self.optimizer)
            require_plain_step(scheduler)
            self._scheduler = scheduler
        self.gate.resolve_pending()
        return self._scheduler

    @property
    def scaler(self) -> torch.amp.GradScaler:
        """The loss scaler (``torch.amp.GradScaler``), enabled only for fp16."""
        return self.gate.scaler

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return the ``torch.autocast`` context of the forward pass.

        It does nothing for fp32 and tf32, and under FSDP with weights in half precision.
        """
        dtype = None if self._strategy.casts else autocast_dtype(self.amp)
        # Entering a disabled autocast still costs some microseconds.
        return NOTHING if dtype is None else torch.autocast(self.device.type, dtype=dtype)

    def training_step(
        self,
        batch: Any,
        loss: LossFunction,
        weights: Sequence[Weight] | None = None,
        total: float | None = None,
    ) -> StepResult:
        """Accumulate the gradients of a batch, or of several micro-batches, and take one optimizer step.

        The loss of the step is the mean over the micro-batches, or with ``weights`` the weighted mean.
        Gradients that the parameters already have, e.g. from another model's loss, are dropped.

        Args:
            batch: one batch for ``loss``: a tensor, a list, a tuple, a dict or an object. Several
                micro-batches of one optimizer step are a :class:`hpcrun.MicroBatches`. Tensors on any device
                are moved to :attr:`device`.
            loss: called as ``loss(model, batch)``; returns the mean loss over a batch's samples, a
                floating-point tensor of shape ().
            weights: weight of each micro-batch, such as its number of valid tokens: numbers, or
                tensors of one element on any device. None: equal weights on all ranks.
            total: the sum of the weights over all ranks, if known; saves an all-reduce.

        Returns:
            The loss, the gradient norm, and whether the step was skipped because of a NaN or an infinity.

        Raises:
            ValueError: there are no micro-batches, the number of weights differs, or a weight is negative
                or not a scalar.
            RuntimeError: there are several ranks, and ``wrap_model()`` was not called.
        """
        micro_batches = batch if isinstance(batch, MicroBatches) else MicroBatches([batch])
        factors = self._begin(micro_batches, loss, weights, total)
        value = self._backward(micro_batches, loss, factors)
        return self._update(value)

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
            The outcome, the same on every rank, in bytes and seconds. A failed save raises nothing.

        Raises:
            CheckpointError: on all ranks, if the folder holds steps of another training, which
                :meth:`load_checkpoint` did not load.
            RuntimeError: the parallelism is FSDP, and ``wrap_model()`` was not called.
        """
        return self.start_checkpoint(where, step, extra, meta).wait()[-1]

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
        engine.require_restored("load_checkpoint()")
        state = self._state()
        shared, rank = state.capture(dict(extra or {}))
        own, meta, alike = {**(own or {}), **rank}, dict(meta or {}), state.alike()
        engine.start(step, shared, own, meta, alike, disk=disk, memory=memory)
        return engine

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
            ``step`` (finished steps), ``shared["extra"]`` (your data), ``meta``, and ``notes`` on changes.

        Raises:
            CheckpointError: checkpoints exist but none is valid, or the newest does not fit the model.
            RuntimeError: the parallelism is FSDP, and ``wrap_model()`` was not called.
        """
        engine, state = self._engine(where), self._state()
        restored = engine.restore(state.template(), skip)
        return None if restored is None else state.restore(restored)

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

    def _state(self) -> TrainingState:
        # First apply the last step's result to the schedule: the optimizer holds its learning rate.
        self.gate.resolve_pending()
        self.after_evaluation()
        return TrainingState(
            self.model,
            self.optimizer,
            scaler=self.gate,
            scheduler=self.scheduler,
            averages=self.average,
            buffers_differ=self._strategy.buffers_differ,
            rank_parts=self._rank_parts(),
        )

    def _rank_parts(self) -> Mapping[str, RankPart]:
        """Return the parts of a checkpoint that each rank has for itself."""
        return {"threads": THREADS} if self.device.type == "cpu" else {}

    def _checkpoint_ranks(self) -> Ranks:
        """Return the ranks that save together. Collective at the first call."""
        return Ranks()

    def _begin(
        self,
        micro_batches: MicroBatches,
        loss: LossFunction,
        weights: Sequence[Weight] | None,
        total: float | None,
    ) -> Sequence[Weight] | None:
        """Clear the gradients; return the factor of each micro-batch's loss, or None for equal factors."""
        if not micro_batches:
            raise ValueError("a training step needs at least one micro-batch")
        self._before_step(micro_batches, loss)
        self._clear()
        self._weights = weights or ()
        if weights is None:
            return None
        if len(weights) != len(micro_batches):
            raise ValueError(f"{len(micro_batches)} micro-batches, but {len(weights)} weights")
        return loss_factors(weights, total, ranks=self._ranks, device=self.device)

    def _before_step(self, micro_batches: MicroBatches, loss: LossFunction) -> None:
        """Do what the first step needs, such as DDP's order of buckets; called before every step."""

    def _clear(self) -> None:
        # optimizer.zero_grad() also records a profiler event, which costs more than the work itself.
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def _backward(
        self,
        micro_batches: MicroBatches,
        loss: LossFunction,
        factors: Sequence[Weight] | None,
    ) -> Tensor:
        """Accumulate the gradients; return the sum of the scaled losses, in float32."""
        self._leave_evaluation()
        total: Tensor | None = None
        parts = len(micro_batches)
        for index, batch in enumerate(micro_batches):
            with self._strategy.micro_batch(self.model, last=index == parts - 1):
                with self.autocast():
                    value = loss(self.model, to_device(batch, self.device))
                    if self._replays_graphs:
                        value = value.clone()  # The next replay overwrites the model's outputs.
                    if factors is not None:
                        value = weighted(value, factors[index])
                    elif parts > 1:
                        value = value / parts
                self._strategy.before_backward(value)
                torch.autograd.backward(self.scaler.scale(value))
            seen = value.detach().float()
            total = seen if total is None else total + seen
        assert total is not None
        return total

    def _update(self, total: Tensor) -> StepResult:
        """Take the optimizer step with the accumulated gradients."""
        optimizer = self.optimizer
        # Read the schedule only here: the property waits for the result of the previous step.
        _ = self.scheduler
        learning_rate = optimizer.param_groups[0]["lr"]
        norm, decision = self.gate.step(optimizer, self._clip if self.clip_norm else None)
        self._clear()
        return StepResult(total, norm, decision, learning_rate, self._weights)

    def _clip(self) -> Tensor:
        assert self.clip_norm is not None
        return self._strategy.clip(trained_by(self.optimizer), self.clip_norm)

    def _after_step(self, skipped: bool) -> None:
        if self._scheduler is not None and not skipped:
            self._scheduler.step()
        if self._average is not None and not skipped:
            self._average.update()

    def _choose_strategy(self) -> Strategy:
        return Strategy()

    def _require_final_parameters(self) -> None:
        """Raise RuntimeError if wrapping the model will replace its parameters."""

    def _leave_evaluation(self) -> None:
        # Only if one of the two is in evaluation mode: submodules that the user keeps in it (frozen norms)
        # must stay in it.
        if not (self.model.training and self.module.training):
            self.model.train()
