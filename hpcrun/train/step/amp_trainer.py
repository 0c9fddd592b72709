"""One optimiser step, right in every detail, on one device."""

import contextlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hpcrun.checkpoint.sharded.engine import CheckpointEngine
from hpcrun.config import AMPConfig
from hpcrun.train.parallel.strategies import Strategy
from hpcrun.train.step.checkpointing import Checkpointing
from hpcrun.train.step.ema import WeightAverage
from hpcrun.train.step.gate import StepGate, Verdict
from hpcrun.train.step.precision import autocast_dtype, choose_matmul
from hpcrun.train.step.to_device import to_device
from hpcrun.train.step.weighting import Weight, loss_factors, weighted

LossFunction = Callable[[nn.Module, Any], Tensor]

_AS_IT_IS = contextlib.nullcontext()


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gives: mean loss of this rank's samples and global gradient norm, scalars on the device.

    Of a weighted step ``loss`` is this rank's part: the mean over ranks is the weighted mean.
    ``gradient_norm`` is None without clipping. ``learning_rate``: the one the step was taken with, of
    the first parameter group. ``weighed``: of a weighted step, each micro-batch's own loss and its factor;
    ``weights`` are those that were given.
    """

    loss: Tensor
    gradient_norm: Tensor | None
    verdict: Verdict
    learning_rate: float
    weighed: Sequence[tuple[Tensor, Weight]] = ()
    weights: Sequence[Weight] = ()

    @property
    def skipped(self) -> bool:
        """Whether a gradient was not finite, so that nothing changed; asking may wait for the device."""
        return self.verdict.skipped


class AMPTrainer(Checkpointing):
    """Mixed-precision training steps with accumulation, clipping and loss scaling, on one device."""

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
        """Move ``model`` to ``device`` (default: the current CUDA device, or the CPU).

        Args:
            optimizer: the optimiser, or a function that makes it from the wrapped model (which
                sharding needs, because it replaces the parameters). Its ``step()`` takes no closure.
            clip_norm: the global gradient norm to clip to; None: no clipping.
            scheduler: makes the learning-rate schedule; its ``step()``, without a metric, is called after
                every step that was taken.
            ema: the decay of an average of the weights, which takes in every step that was taken.

        Raises:
            ValueError: an optimiser or a schedule that steps otherwise; of one that is made by a function,
                when it is made.
        """
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = torch.device(device)
        self.amp = amp or AMPConfig()
        self._strategy = self._choose_strategy()
        if self._strategy.replaces_parameters and isinstance(optimizer, Optimizer):
            raise ValueError(
                "sharding replaces the parameters that this optimizer has; give a function that makes it"
            )
        if isinstance(optimizer, Optimizer):
            require_plain_step(optimizer)
        if isinstance(scheduler, LRScheduler):
            raise ValueError("give a function that makes the schedule from the optimizer")
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
        self._weighed: list[tuple[Tensor, Weight]] = []
        self._weights: Sequence[Weight] = ()
        self._engines: dict[Path, CheckpointEngine] = {}
        self._begun: set[CheckpointEngine] = set()

    @property
    def is_distributed(self) -> bool:
        """Whether gradients are averaged over ranks."""
        return False

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return True

    @property
    def forward_is_collective(self) -> bool:
        """Whether forward passes wait for those of the other ranks also without gradients."""
        return self._strategy.collective_forward

    def after_evaluation(self) -> None:
        """Call it after forward passes through ``module`` that no backward pass follows."""
        self._strategy.after_evaluation(self.module)

    def whole_module(self) -> nn.Module | None:
        """The model with all its weights, without wrapper; on ranks other than 0 it may be None. Collective.

        A sharded model comes as a copy, on the device if it fits there, and on the CPU otherwise.
        """
        self._require_final_parameters()
        return self._strategy.whole(self.module, self.device)

    @property
    def _ranks(self) -> int:
        """How many share a step."""
        return 1

    @property
    def optimizer(self) -> Optimizer:
        """The optimiser, made at the first call from the model as it is wrapped by then."""
        if self._optimizer is None:
            self._require_final_parameters()
            made = self._make_optimizer
            optimizer = made if isinstance(made, Optimizer) else made(self.model)
            require_plain_step(optimizer)
            self._optimizer = optimizer
            if self._ema is not None:
                self._average = WeightAverage(self.model, self._ema)
        return self._optimizer

    @property
    def average(self) -> WeightAverage | None:
        """The average of the weights, if one is kept, with all steps that were taken."""
        if self._ema is None:
            return None
        _ = self.optimizer
        self.gate.settle()
        return self._average

    def averaged(self) -> contextlib.AbstractContextManager[None]:
        """For the block the model has its averaged weights, if they are kept."""
        average = self.average
        return contextlib.nullcontext() if average is None else average.in_place()

    @property
    def scheduler(self) -> LRScheduler | None:
        """The learning-rate schedule, if one was given, where it stands after the last step."""
        if self._scheduler is None and self._make_scheduler is not None:
            scheduler = self._make_scheduler(self.optimizer)
            require_plain_step(scheduler)
            self._scheduler = scheduler
        self.gate.settle()
        return self._scheduler

    @property
    def scaler(self) -> torch.amp.GradScaler:
        """The loss scaler, enabled for fp16."""
        return self.gate.scaler

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The precision context of the forward pass; it does nothing for fp32 and tf32."""
        dtype = autocast_dtype(self.amp)
        # One that is made but disabled takes some microseconds as well.
        return _AS_IT_IS if dtype is None else torch.autocast(self.device.type, dtype=dtype)

    def training_step(
        self,
        micro_batches: Sequence[Any],
        loss: LossFunction,
        weights: Sequence[Weight] | None = None,
        total: float | None = None,
    ) -> StepResult:
        """Accumulate the gradients of ``micro_batches`` and take one optimiser step.

        Gradients that the optimiser's parameters have by then, as of another model's loss, do not count.

        Args:
            micro_batches: what ``loss`` takes, on any device.
            loss: returns the mean loss over a batch's samples, a scalar.
            weights: how much each micro-batch counts, such as its number of valid tokens: numbers, or
                scalars on any device; None: all as much, on all ranks.
            total: the sum of the weights over all ranks, where it is known.

        Raises:
            ValueError: there are no micro-batches, or not as many weights, or these are not scalars from
                zero up.
            TypeError: ``micro_batches`` is no list or other sequence.
        """
        factors = self._begin(micro_batches, loss, weights, total)
        return self._update(self._backward(micro_batches, loss, factors))

    def _begin(
        self,
        micro_batches: Sequence[Any],
        loss: LossFunction,
        weights: Sequence[Weight] | None,
        total: float | None,
    ) -> Sequence[Weight] | None:
        """Begin a step with clean gradients; what to multiply its losses with, or None: all alike."""
        if not isinstance(micro_batches, (list, tuple)):
            _require_sequence(micro_batches)
        if not micro_batches:
            raise ValueError("a training step needs at least one micro-batch")
        self._settle(micro_batches[0], loss)
        self._clear()
        self._weighed, self._weights = [], weights or ()
        if weights is None:
            return None
        if len(weights) != len(micro_batches):
            raise ValueError(f"{len(micro_batches)} micro-batches, but {len(weights)} weights")
        return loss_factors(weights, total, ranks=self._ranks, device=self.device)

    def _settle(self, batch: Any, loss: LossFunction) -> None:
        """Do what must be done once before the first step."""

    def _clear(self) -> None:
        # What optimizer.zero_grad() does, without the mark for the profiler that costs more than that.
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def _backward(
        self,
        micro_batches: Sequence[Any],
        loss: LossFunction,
        factors: Sequence[Weight] | None,
    ) -> Tensor:
        """Accumulate the gradients; returns the sum of what was differentiated."""
        self._leave_evaluation()
        total: Tensor | None = None
        parts = len(micro_batches)
        for index, batch in enumerate(micro_batches):
            with self._strategy.micro_batch(self.model, last=index == parts - 1):
                with self.autocast():
                    value = loss(self.model, to_device(batch, self.device))
                    if factors is not None:
                        self._weighed.append((value.detach(), factors[index]))
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
        """Take the optimiser step with the gradients that are there."""
        optimizer = self.optimizer
        # The schedule is asked for only now: it waits for what became of the step before.
        _ = self.scheduler
        learning_rate = optimizer.param_groups[0]["lr"]
        norm, verdict = self.gate.step(optimizer, self._clip if self.clip_norm else None)
        self._clear()
        return StepResult(total, norm, verdict, learning_rate, self._weighed, self._weights)

    def _clip(self) -> Tensor:
        assert self.clip_norm is not None
        return self._strategy.clip(trained_by(self.optimizer), self.clip_norm)

    def _after_step(self, skipped: bool, scale_factor: float) -> None:
        if self._scheduler is not None and not skipped:
            self._scheduler.step()
        if self._average is not None and not skipped:
            self._average.update()

    def _choose_strategy(self) -> Strategy:
        return Strategy()

    def _require_final_parameters(self) -> None:
        """Raise RuntimeError where wrapping the model will replace its parameters."""

    def _leave_evaluation(self) -> None:
        # Only where it was entered: parts that the user keeps in it (frozen norms) stay so.
        if not (self.model.training and self.module.training):
            self.model.train()


def trained_by(optimizer: Optimizer) -> list[nn.Parameter]:
    """All parameters of the optimiser, in the order of its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _require_sequence(micro_batches: Any) -> None:
    if not isinstance(micro_batches, Sequence):
        raise TypeError(
            "training_step takes a list of micro-batches, be it [batch], and this is a "
            f"{type(micro_batches).__name__}"
        )


def require_plain_step(stepped: Optimizer | LRScheduler) -> None:
    """Raises ValueError where a step needs to be given something, as a closure or a metric."""
    needed = [
        parameter.name
        for parameter in list(inspect.signature(type(stepped).step).parameters.values())[1:]
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    if not needed:
        return
    instead = (
        "make it in your loop, of trainer.optimizer, and step it there"
        if isinstance(stepped, LRScheduler)
        else "take one that steps with the gradients that are there, as SGD and Adam do"
    )
    raise ValueError(
        f"a training step has nothing to give to {type(stepped).__name__}.step({', '.join(needed)}); "
        f"{instead}"
    )
