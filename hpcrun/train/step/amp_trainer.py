"""AMPTrainer: optimizer steps on one device, with mixed precision, accumulation and clipping."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hpcrun.checkpoint.sharded.engine import CheckpointEngine
from hpcrun.checkpoint.state.training import RankPart, TrainingState
from hpcrun.config import AMPConfig
from hpcrun.devices.accelerator import default_device
from hpcrun.errors import UserError
from hpcrun.printing import say_aside
from hpcrun.train.data.micro_batches import MicroBatches
from hpcrun.train.model.prepare import Preparation, prepare
from hpcrun.train.parallel.given_wrapper import require_one_process, warn_of_copies
from hpcrun.train.parallel.strategies import NOTHING, Strategy
from hpcrun.train.step.accumulation import Accumulation
from hpcrun.train.step.arguments import (
    MakeOptimizer,
    optimizer_and_precision,
    require_makers,
    require_plain_step,
)
from hpcrun.train.step.checkpoints import TrainerCheckpoints
from hpcrun.train.step.default_loss import add_hint, loss_of_model
from hpcrun.train.step.distributed_flag import DistributedFlag
from hpcrun.train.step.ema import THREADS, WeightAverage
from hpcrun.train.step.even_batches import EvenBatches
from hpcrun.train.step.gate import StepDecision, StepGate, trained_by
from hpcrun.train.step.precision import (
    LossFunction,
    StepResult,
    autocast_dtype,
    choose_matmul,
    to_device,
)
from hpcrun.train.step.weighting import Weight, loss_factors, weighted


class AMPTrainer(TrainerCheckpoints):
    """Mixed-precision training steps with gradient accumulation, clipping and loss scaling, on one device.

    Weights and optimizer state keep their dtype, usually float32; autocast casts operations of the forward
    pass. Sources: ``torch.amp``; Micikevicius et al. 2018, arXiv:1710.03740.

    Attributes:
        device: the device of the weights.
        module: the model without a wrapper.
        model: the module for forward passes; the same as ``module`` on one device.
        amp: the precision.
        clip_norm: maximum global gradient norm, or None.
        accumulation: the count of the calls that make one optimizer step.
    """

    is_distributed = DistributedFlag()

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | MakeOptimizer | AMPConfig | None = None,
        *,
        config: AMPConfig | None = None,
        amp: AMPConfig | None = None,
        clip_norm: float | None = None,
        scheduler: Callable[[Optimizer], LRScheduler] | None = None,
        device: torch.device | str | None = None,
        ema: float | None = None,
        accumulation_steps: int = 1,
        learning_rate: float | None = None,
    ) -> None:
        """Move ``model`` to ``device``.

        Args:
            model: the model to train.
            optimizer: the optimizer, or a function that makes it from the wrapped model. FSDP needs the
                function, because it replaces the parameters. Its ``step()`` takes no closure. None: AdamW.
                Or an AMPConfig, as for ``config``.
            config: other name of ``amp``.
            amp: precision and loss scaling; None: float32.
            clip_norm: maximum global gradient norm, as ``torch.nn.utils.clip_grad_norm_``; None: no clipping.
            scheduler: function that makes the learning-rate schedule from the optimizer. Its ``step()``
                takes no metric and is called after every step that was not skipped.
            device: where to train; None: the current GPU, or the CPU.
            ema: decay of an exponential moving average of the weights (``torch.optim.swa_utils``), updated
                after every step that was not skipped.
            accumulation_steps: calls of :meth:`training_step` that make one optimizer step, with the mean of
                their losses. Give all ranks the same number.
            learning_rate: of the AdamW without ``optimizer``; None: 1e-3.

        Raises:
            ValueError: the model is in DistributedDataParallel over several ranks, an argument contradicts
                another or has another type, the optimizer's ``step()`` needs an argument, or ``scheduler`` is
                an object instead of a function. Objects that a function makes are checked when they are made.
        """
        if device is None:
            device = default_device()
        self.device = torch.device(device)
        require_one_process(model)
        optimizer, self.amp = optimizer_and_precision(optimizer, config, amp, learning_rate)
        self._strategy = self._choose_strategy()
        require_makers(optimizer, scheduler, replaced=self._strategy.replaces_parameters)
        self.module = self._strategy.place(model, self.device)
        self.model: nn.Module = self.module
        self.clip_norm = clip_norm
        choose_matmul(self.amp, self.device)
        self.gate = StepGate(self.amp, self.device, self._after_step)
        self.accumulation = Accumulation(accumulation_steps, self.gate)
        self._even = EvenBatches()
        self._make_optimizer = optimizer
        self._make_scheduler = scheduler
        self._optimizer: Optimizer | None = None
        self._scheduler: LRScheduler | None = None
        self._ema = ema
        self._average: WeightAverage | None = None
        self._weights: Sequence[Weight] = ()
        self._checkpoints_activations = False
        self._engines: dict[Path, CheckpointEngine] = {}

    @property
    def _replays_graphs(self) -> bool:
        """True if the compiled model captures CUDA graphs, so that its outputs live in reused memory."""
        return False

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

    def enable_gradient_checkpointing(self) -> None:
        """Recompute activations in the backward pass, to save memory (``torch.utils.checkpoint``).

        Raises:
            UserError: the training has begun, or the model has no blocks; the text has the remedy.
        """
        if self.steps or not self.accumulation.begins or self._checkpoints_activations:
            raise UserError(
                "enable_gradient_checkpointing: the training has begun, or it was called before; call it "
                "once, before the first training step"
            )
        prepare(self.module, Preparation(checkpointing="full"))
        self._checkpoints_activations = True

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
        loss: LossFunction | None = None,
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
                floating-point tensor of shape (). None: the model's output is the loss, see
                :func:`hpcrun.train.step.default_loss.loss_of_model`.
            weights: weight of each micro-batch, such as its number of valid tokens: numbers, or
                tensors of one element on any device. None: equal weights on all ranks.
            total: the sum of the weights over all ranks, if known; saves an all-reduce.

        Returns:
            The loss, the gradient norm, and whether the step was skipped because of a NaN or an infinity.
            With ``accumulation_steps``, the loss of this call, and ``updated=False`` before the last call.

        Raises:
            ValueError: there are no micro-batches, the number of weights differs, a weight is negative or not
                a scalar, or there are weights and ``accumulation_steps``.
            UserError: without ``loss``, the model returned no loss.
            RuntimeError: there are several ranks, and ``wrap_model()`` was not called.
        """
        micro_batches = batch if isinstance(batch, MicroBatches) else MicroBatches([batch])
        computed = loss or loss_of_model
        try:
            factors = self._begin(micro_batches, computed, weights, total)
            value = self._backward(micro_batches, computed, factors)
            return self._update(value)
        except Exception as error:
            self.accumulation.fail()
            if not self.steps:
                add_hint(error, batch, own_loss=loss is not None)
            self._explain(error)
            raise

    def even(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches until every rank has used its batches, also if their numbers differ. Collective.

        Call :meth:`training_step` with each batch. A rank without a batch gets a used batch again, and its
        weight is 0: the loss of the step is the mean over the ranks that have a batch, or with ``weights``
        the weighted mean. Each step has a small all-reduce on the CPU. A batch norm of a rank without a batch
        updates its statistics with the used batch.

        Args:
            batches: this rank's batches, such as a ``DataLoader``.
        """
        return self._even.over(batches, self._checkpoint_ranks())

    def mean(self, value: Any) -> float:
        """Return the mean of ``value`` over all ranks, on every rank, such as of a loss. Collective.

        Args:
            value: a number, a tensor of one element, or a StepResult; reading it waits for the device.
        """
        return self._checkpoint_ranks().mean(float(value))

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

    def _rank_parts(self) -> dict[str, RankPart]:
        """Return the parts of a checkpoint that each rank has for itself."""
        parts = {"threads": THREADS} if self.device.type == "cpu" else {}
        readable = not self._strategy.replaces_parameters
        gradients = self.accumulation.part(self.model, readable=readable)
        return {**parts, "gradients": gradients}

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
        if weights is not None and self.accumulation.calls > 1:
            raise ValueError(
                "weights need the micro-batches of an optimizer step in one call: pass hpcrun.MicroBatches "
                "and weights to a trainer without accumulation_steps"
            )
        self._before_step(micro_batches, loss)
        # Here, because the program may as well end with the exception.
        if line := self.accumulation.told():
            say_aside(f"hpcrun: {line}")
        if self.accumulation.begins:
            self._clear()
        self._weights = weights or ()
        weights, total = self._even.weights(weights, total, len(micro_batches))
        if weights is None:
            return None
        if len(weights) != len(micro_batches):
            raise ValueError(f"{len(micro_batches)} micro-batches, but {len(weights)} weights")
        return loss_factors(weights, total, ranks=self.ranks, device=self.device)

    def _explain(self, error: Exception) -> None:
        """Raise a better error than ``error``, which a step raised, if there is one."""

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
        parts, calls = len(micro_batches), self.accumulation.calls
        updates = self.accumulation.updates
        for index, batch in enumerate(micro_batches):
            with self._strategy.micro_batch(self.model, last=updates and index == parts - 1):
                with self.autocast():
                    value = loss(self.model, to_device(batch, self.device))
                    if self._replays_graphs:
                        value = value.clone()  # The next replay overwrites the model's outputs.
                    if factors is not None:
                        value = weighted(value, factors[index])
                    elif parts > 1:
                        value = value / parts
                seen = value.detach().float()
                if calls > 1:
                    value = value / calls
                self._strategy.before_backward(value)
                torch.autograd.backward(self.scaler.scale(value))
            total = seen if total is None else total + seen
        assert total is not None
        return total

    def _update(self, total: Tensor) -> StepResult:
        """Take the optimizer step with the accumulated gradients."""
        optimizer = self.optimizer
        # Read the schedule only here: the property waits for the result of the previous step.
        _ = self.scheduler
        learning_rate = optimizer.param_groups[0]["lr"]
        if not self.accumulation.count():
            pending = StepDecision(self.gate, skipped=False)
            return StepResult(total, None, pending, learning_rate, self._weights, updated=False)
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
        warn_of_copies()
        return Strategy()

    def _require_final_parameters(self) -> None:
        """Raise RuntimeError if wrapping the model will replace its parameters."""

    def _leave_evaluation(self) -> None:
        # Only if one of the two is in evaluation mode: submodules that the user keeps in it (frozen norms)
        # must stay in it.
        if not (self.model.training and self.module.training):
            self.model.train()
