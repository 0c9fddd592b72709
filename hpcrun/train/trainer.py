"""One optimiser step, right in every detail: the trainer, on one device and on many.

Both classes work in a loop of your own; the package's loop uses nothing else.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hpcrun.checkpoint import state
from hpcrun.checkpoint.engine import CheckpointEngine
from hpcrun.cluster.distributed import DistributedConfig
from hpcrun.config import AMPConfig
from hpcrun.config.training import FSDP
from hpcrun.train import process_group
from hpcrun.train.batch import to_device
from hpcrun.train.checkpointing import Checkpointing, folder_engine
from hpcrun.train.compression import Compression
from hpcrun.train.ema import WeightAverage
from hpcrun.train.parallel import Parallel, strategy
from hpcrun.train.precision import autocast_dtype, choose_matmul
from hpcrun.train.preparation import Preparation, prepare
from hpcrun.train.stepping import StepGate, Verdict
from hpcrun.train.strategies import Strategy
from hpcrun.train.together import together
from hpcrun.train.untouched import kept_buffers, kept_gradients
from hpcrun.train.unused import require_all_used
from hpcrun.train.weighting import Weight, loss_factors, share_gradients, weighted

LossFunction = Callable[[nn.Module, Any], Tensor]

_AS_IT_IS = contextlib.nullcontext()


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gives: mean loss of this rank's samples and global gradient norm, scalars on the device.

    Of a weighted step ``loss`` is this rank's part: the mean over ranks is the weighted mean.
    ``gradient_norm`` is None without clipping. ``learning_rate``: the one the step was taken with, of
    the first parameter group.
    """

    loss: Tensor
    gradient_norm: Tensor | None
    verdict: Verdict
    learning_rate: float

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
                sharding needs, because it replaces the parameters).
            clip_norm: the global gradient norm to clip to; None: no clipping.
            scheduler: makes the learning-rate schedule; it is stepped after every step that was taken.
            ema: the decay of an average of the weights, which takes in every step that was taken.
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
        self._engines: dict[Path, CheckpointEngine] = {}

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
        return self._strategy.whole(self.module, self.device)

    @property
    def _ranks(self) -> int:
        """How many share a step."""
        return 1

    @property
    def optimizer(self) -> Optimizer:
        """The optimiser, made at the first call from the model as it is wrapped by then."""
        if self._optimizer is None:
            made = self._make_optimizer
            self._optimizer = made if isinstance(made, Optimizer) else made(self.model)
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
            self._scheduler = self._make_scheduler(self.optimizer)
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

        Args:
            micro_batches: what ``loss`` takes, on any device.
            loss: returns the mean loss over a batch's samples, a scalar.
            weights: how much each micro-batch counts, such as its number of valid tokens: numbers, or
                scalars on any device; None: all as much, on all ranks.
            total: the sum of the weights over all ranks, where it is known.

        Raises:
            ValueError: there are no micro-batches, or not as many weights.
        """
        factors = self._factors(micro_batches, weights, total)
        return self._update(self._backward(micro_batches, loss, factors))

    def _factors(
        self, micro_batches: Sequence[Any], weights: Sequence[Weight] | None, total: float | None
    ) -> Sequence[Weight] | None:
        """What to multiply the losses with; None: all alike."""
        if not micro_batches:
            raise ValueError("a training step needs at least one micro-batch")
        if weights is None:
            return None
        if len(weights) != len(micro_batches):
            raise ValueError(f"{len(micro_batches)} micro-batches, but {len(weights)} weights")
        return loss_factors(weights, total, ranks=self._ranks, device=self.device)

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
                        value = weighted(value, factors[index])
                    elif parts > 1:
                        value = value / parts
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
        # What optimizer.zero_grad() does, without the mark for the profiler that costs more than that.
        for parameter in _trained(optimizer):
            parameter.grad = None
        return StepResult(total, norm, verdict, learning_rate)

    def _clip(self) -> Tensor:
        assert self.clip_norm is not None
        return self._strategy.clip(_trained(self.optimizer), self.clip_norm)

    def _after_step(self, skipped: bool, scale_factor: float) -> None:
        if self._scheduler is not None and not skipped:
            self._scheduler.step()
        if self._average is not None and not skipped:
            self._average.update()

    def _choose_strategy(self) -> Strategy:
        return Strategy()

    def _leave_evaluation(self) -> None:
        # Only where it was entered: parts that the user keeps in it (frozen norms) stay so.
        if not (self.model.training and self.module.training):
            self.model.train()


class DistributedAMPTrainer(AMPTrainer):
    """The same over many ranks, which share the work in one of several ways."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Callable[[nn.Module], Optimizer],
        *,
        distributed: DistributedConfig | None = None,
        amp: AMPConfig | None = None,
        clip_norm: float | None = None,
        scheduler: Callable[[Optimizer], LRScheduler] | None = None,
        device: torch.device | str | None = None,
        ema: float | None = None,
        parallel: Parallel = "ddp",
        fsdp: FSDP | None = None,
        preparation: Preparation | None = None,
        compression: Compression | None = None,
    ) -> None:
        """As :class:`AMPTrainer`; with ``fsdp`` the model moves to the device when it is wrapped.

        Args:
            distributed: where this rank stands; by default what the launcher's variables say.
            parallel: how the ranks share the work; a single rank does all of it whatever this says.
            fsdp: how the model is sharded, for ``parallel="fsdp"``.
            preparation: layout, activation checkpointing and compilation.
            compression: how DDP compresses gradients on their way; it is this trainer's alone.

        Raises:
            ValueError: ``single`` or ``dp`` with several ranks; an optimiser of parameters that will go;
                compression without DDP.
        """
        self.distributed = distributed or DistributedConfig.from_env()
        self._parallel, self._fsdp = parallel, fsdp or FSDP()
        self._preparation = preparation or Preparation()
        self._compression = compression
        if compression is not None and parallel == "fsdp":
            raise ValueError("gradients are compressed by DDP's hooks, which FSDP does not have")
        if device is None:
            ids = self.distributed.device_ids
            device = torch.device("cuda", ids[0]) if ids else torch.device("cpu")
        super().__init__(
            model,
            optimizer,
            amp=amp,
            clip_norm=clip_norm,
            scheduler=scheduler,
            device=device,
            ema=ema,
        )
        self._control: Any = None
        self._wrapped = False
        self._buckets_settled = False

    @property
    def _ranks(self) -> int:
        return self.distributed.world_size

    @property
    def is_distributed(self) -> bool:
        """Whether there is more than one rank."""
        return self.distributed.world_size > 1

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return self.distributed.rank == 0

    @property
    def parallel(self) -> Parallel:
        """How the ranks share the work."""
        return self._parallel

    def setup_distributed(self) -> DistributedConfig:
        """Join the process group, unless that is done already; raises ClusterError as it does."""
        self.distributed = process_group.setup_distributed(self.distributed)
        return self.distributed

    def wrap_model(self) -> nn.Module:
        """Prepare and wrap the model, and return what forward passes must go through. Collective.

        Raises:
            UserError: the model has not what the preparation or the sharding asks for.
        """
        if not self._wrapped:
            self._wrapped = True
            self._strategy.remember(self.module)
            prepare(self.module, self._preparation)
            self.model = self._strategy.wrap(self.module, self._preparation.compile)
            if self._compression is not None and isinstance(self.model, DistributedDataParallel):
                self._compression.attach(self.model)
                self.gate.at_once = self._compression.at_once
        return self.model

    def training_step(
        self,
        micro_batches: Sequence[Any],
        loss: LossFunction,
        weights: Sequence[Weight] | None = None,
        total: float | None = None,
    ) -> StepResult:
        """As :meth:`AMPTrainer.training_step`, gradients averaged over ranks at the last micro-batch.

        ``weights`` are this rank's: all ranks give some, or none does. The first call of a process asks
        ``loss`` once more than it takes steps, and puts back what that changed: gradients, buffers and
        random generators.
        """
        if not self._buckets_settled:
            self._settle_buckets(micro_batches, loss)
        return super().training_step(micro_batches, loss, weights, total)

    def joined_step(
        self,
        micro_batches: Sequence[Any],
        loss: LossFunction,
        weights: Sequence[Weight],
        total: float | None = None,
    ) -> StepResult:
        """As :meth:`training_step`, but a rank whose weights are all the number 0 has nothing to compute.

        It answers the others' collectives out of DDP's Join, which leaves it without their gradients:
        it gets these from rank 0, which must have samples, so that all ranks take the same step.

        Raises:
            ValueError: the ranks do not share the work by DDP.
        """
        if not self._buckets_settled:
            self._settle_buckets(micro_batches, loss)
        factors = self._factors(micro_batches, weights, total)
        idle = not any(isinstance(weight, Tensor) or weight for weight in weights)
        value = torch.zeros((), device=self.device)
        with self._strategy.join(self.model):
            if idle:
                self.scaler.scale(value)  # It has no scale to undo before the first time.
            else:
                value = self._backward(micro_batches, loss, factors)
        share_gradients(_trained(self.optimizer), self.device, wanting=idle)
        return self._update(value)

    def control_group(self) -> Any:
        """A gloo group for decisions and checkpoints, apart from the gradients' collectives."""
        if self._control is None:
            self._control = process_group.control_group(self.distributed)
        return self._control

    @property
    def _buffers_differ(self) -> bool:
        return self._strategy.buffers_differ

    def _choose_strategy(self) -> Strategy:
        return strategy(self._parallel, self.distributed, self.amp, self._fsdp)

    def _after_step(self, skipped: bool, scale_factor: float) -> None:
        super()._after_step(skipped, scale_factor)
        if self._compression is not None:
            self._compression.after_step(skipped, scale_factor)

    def _capture_own(self) -> dict[str, Any]:
        own = super()._capture_own()
        kept = None if self._compression is None else self._compression.capture()
        return own if kept is None else {**own, "compression": kept}

    def _restore_compression(self, own: dict[str, Any] | None) -> str | None:
        if self._compression is None:
            return None
        kept = None if own is None else own.get("compression")
        return self._compression.restore(kept, self.gate.steps, self.device)

    def _make_engine(self, folder: Path) -> CheckpointEngine:
        return folder_engine(
            folder,
            owner=f"{self.distributed.job_id or 0}-{self.distributed.restart_count}",
            rank=self.distributed.rank,
            world_size=self.distributed.world_size,
            group=self.control_group(),
        )

    def _settle_buckets(self, micro_batches: Sequence[Any], loss: LossFunction) -> None:
        """Let DDP find its final bucket layout before the first step that counts.

        DDP regroups its gradient buckets after the first backward pass of a process, and where a
        gradient lies in a bucket decides in which order a ring adds the ranks' values. Without this
        the first step after a resume would round differently from the same step undisturbed.
        """
        self._buckets_settled = True
        if not micro_batches or not self._strategy.unsettled(self.model):
            return
        generators = state.capture_rank()
        hook = contextlib.nullcontext() if self._compression is None else self._compression.idle()
        with kept_buffers(self.module), kept_gradients(self.module), hook:
            self._leave_evaluation()
            with self.autocast():
                value = loss(self.model, to_device(micro_batches[0], self.device))
            together(
                lambda: require_all_used(value, self.module),
                rank=self.distributed.rank,
                group=self.control_group(),
            )
            torch.autograd.backward(value)
        state.apply_rank(generators)


def _trained(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
