"""One optimiser step, right in every detail: the trainer, on one device and on many.

Both classes work in a loop of your own; the package's loop uses nothing else.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hpcrun.checkpoint import state
from hpcrun.checkpoint.store import CheckpointStore
from hpcrun.checkpoint.writer import Restored, SaveOutcome, SynchronousWriter, Writer
from hpcrun.cluster.distributed import DistributedConfig
from hpcrun.config import AMPConfig
from hpcrun.train import process_group

LossFunction = Callable[[nn.Module, Any], Tensor]

# torch 2.13 gives the old name a warning; before, there was only that.
_ddp_arguments = inspect.signature(DistributedDataParallel.__init__).parameters
_SYNC_BUFFERS = (
    "forward_sync_buffers" if "forward_sync_buffers" in _ddp_arguments else "broadcast_buffers"
)

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class StepResult:
    """What a step gives: mean loss of this rank's samples and global gradient norm, scalars on the device.

    ``gradient_norm`` is None without clipping. ``skipped``: the loss scaler found an overflow.
    """

    loss: Tensor
    gradient_norm: Tensor | None
    skipped: bool


class AMPTrainer:
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
    ) -> None:
        """Move ``model`` to ``device`` (default: the current CUDA device, or the CPU).

        Args:
            optimizer: the optimiser, or a function that makes it from the wrapped model (which
                sharding needs, because it replaces the parameters).
            clip_norm: the global gradient norm to clip to; None: no clipping.
            scheduler: makes the learning-rate schedule; it is stepped after every step that was taken.
        """
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = torch.device(device)
        self.module = model.to(self.device)
        self.model: nn.Module = self.module
        self.amp = amp or AMPConfig()
        self.clip_norm = clip_norm
        self.scaler = torch.amp.GradScaler(
            self.device.type,
            init_scale=self.amp.init_scale,
            growth_factor=self.amp.growth_factor,
            backoff_factor=self.amp.backoff_factor,
            growth_interval=self.amp.growth_interval if self.amp.dynamic else 2**31 - 1,
            enabled=self.amp.dtype == "fp16",
        )
        self._make_optimizer = optimizer
        self._make_scheduler = scheduler
        self._optimizer: Optimizer | None = None
        self._scheduler: LRScheduler | None = None
        self._writers: dict[Path, Writer] = {}

    @property
    def is_distributed(self) -> bool:
        """Whether gradients are averaged over ranks."""
        return False

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return True

    @property
    def optimizer(self) -> Optimizer:
        """The optimiser, made at the first call from the model as it is wrapped by then."""
        if self._optimizer is None:
            made = self._make_optimizer
            self._optimizer = made if isinstance(made, Optimizer) else made(self.model)
        return self._optimizer

    @property
    def scheduler(self) -> LRScheduler | None:
        """The learning-rate schedule, if one was given."""
        if self._scheduler is None and self._make_scheduler is not None:
            self._scheduler = self._make_scheduler(self.optimizer)
        return self._scheduler

    def autocast(self) -> torch.autocast:
        """The precision context of the forward pass; disabled for fp32."""
        dtype = _DTYPES.get(self.amp.dtype)
        return torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None)

    def training_step(self, micro_batches: Sequence[Any], loss: LossFunction) -> StepResult:
        """Accumulate the gradients of ``micro_batches``, equally weighted, and take one optimiser step.

        Args:
            micro_batches: what ``loss`` takes, on any device.
            loss: returns the mean loss over a batch's samples, a scalar.

        Raises:
            ValueError: there are no micro-batches.
        """
        if not micro_batches:
            raise ValueError("a training step needs at least one micro-batch")
        self.model.train()
        optimizer, scheduler = self.optimizer, self.scheduler
        total = torch.zeros((), device=self.device)
        for index, batch in enumerate(micro_batches):
            with self._gradient_sync(index == len(micro_batches) - 1):
                with self.autocast():
                    value = loss(self.model, to_device(batch, self.device)) / len(micro_batches)
                torch.autograd.backward(self.scaler.scale(value))
            total += value.detach()
        norm = None
        if self.clip_norm is not None:
            self.scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
        scale = self.scaler.get_scale() if self.scaler.is_enabled() else 1.0
        self.scaler.step(optimizer)
        self.scaler.update()
        optimizer.zero_grad(set_to_none=True)
        # The scaler halves its scale on, and only on, a step that it did not take.
        skipped = self.scaler.is_enabled() and self.scaler.get_scale() < scale
        if scheduler is not None and not skipped:
            scheduler.step()
        return StepResult(total, norm, skipped)

    def save_checkpoint(
        self,
        where: Path | Writer,
        step: int,
        extra: Mapping[str, Any] | None = None,
        meta: Mapping[str, Any] | None = None,
    ) -> SaveOutcome:
        """Commit everything that a restart at ``step`` needs. Collective: every rank calls it.

        Args:
            where: a folder of checkpoints, or a writer made for one.
            extra: plain data and tensors of your own, given back by :meth:`load_checkpoint`.
            meta: plain data kept readable in the manifest.

        Returns:
            Whether it was committed; a failed save is told, on every rank alike, and not raised.
        """
        shared = state.capture_shared(
            self.model,
            self.optimizer,
            scaler=self.scaler if self.scaler.is_enabled() else None,
            scheduler=self.scheduler,
            extra=dict(extra or {}),
        )
        writer = self._writer(where)
        return writer.save(step, shared, state.capture_rank(), dict(meta or {}))

    def load_checkpoint(self, where: Path | Writer) -> Restored | None:
        """Restore the newest valid checkpoint, or return None when there is none. Collective.

        Raises:
            CheckpointError: what was read does not fit this model.
        """
        restored = self._writer(where).restore()
        if restored is not None:
            state.apply_shared(
                restored.shared,
                self.model,
                self.optimizer,
                scaler=self.scaler if self.scaler.is_enabled() else None,
                scheduler=self.scheduler,
            )
            if restored.own is not None:
                state.apply_rank(restored.own)
        return restored

    def _writer(self, where: Path | Writer) -> Writer:
        if not isinstance(where, Path):
            return where
        if where not in self._writers:
            self._writers[where] = self._make_writer(where)
        return self._writers[where]

    def _make_writer(self, folder: Path) -> Writer:
        return SynchronousWriter(
            CheckpointStore(folder, "0-0"),
            rank=0,
            world_size=1,
            group=None,
            still_mine=_nobody_else,
        )

    def _gradient_sync(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()


class DistributedAMPTrainer(AMPTrainer):
    """The same over many ranks with DistributedDataParallel."""

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
    ) -> None:
        """As :class:`AMPTrainer`; ``distributed`` defaults to what the launcher's variables say."""
        self.distributed = distributed or DistributedConfig.from_env()
        if device is None:
            ids = self.distributed.device_ids
            device = torch.device("cuda", ids[0]) if ids else torch.device("cpu")
        super().__init__(
            model, optimizer, amp=amp, clip_norm=clip_norm, scheduler=scheduler, device=device
        )
        self._control: Any = None
        self._buckets_settled = False

    @property
    def is_distributed(self) -> bool:
        """Whether there is more than one rank."""
        return self.distributed.world_size > 1

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return self.distributed.rank == 0

    def setup_distributed(self) -> DistributedConfig:
        """Join the process group, unless that is done already; raises ClusterError as it does."""
        self.distributed = process_group.setup_distributed(self.distributed)
        return self.distributed

    def wrap_model(self) -> nn.Module:
        """Wrap the model for data parallelism, and return what forward passes must go through."""
        if self.is_distributed and self.model is self.module:
            buffers: dict[str, Any] = {_SYNC_BUFFERS: self.distributed.broadcast_buffers}
            self.model = DistributedDataParallel(
                self.module,
                device_ids=list(self.distributed.device_ids) or None,
                find_unused_parameters=self.distributed.find_unused_parameters,
                **buffers,
                gradient_as_bucket_view=self.distributed.gradient_as_bucket_view,
            )
        return self.model

    def training_step(self, micro_batches: Sequence[Any], loss: LossFunction) -> StepResult:
        """As :meth:`AMPTrainer.training_step`, gradients averaged over ranks at the last micro-batch.

        The first call of a process runs ``loss`` once more than it seems, without effect on any state.
        """
        if not self._buckets_settled:
            self._settle_buckets(micro_batches, loss)
        return super().training_step(micro_batches, loss)

    def control_group(self) -> Any:
        """A gloo group for decisions and checkpoints, apart from the gradients' collectives."""
        if self._control is None and self.is_distributed:
            self._control = torch.distributed.new_group(backend="gloo")
        return self._control

    def _make_writer(self, folder: Path) -> Writer:
        owner = f"{self.distributed.job_id or 0}-{self.distributed.restart_count}"
        return SynchronousWriter(
            CheckpointStore(folder, owner),
            rank=self.distributed.rank,
            world_size=self.distributed.world_size,
            group=self.control_group(),
            still_mine=_nobody_else,
        )

    def _gradient_sync(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        if isinstance(self.model, DistributedDataParallel) and not last:
            return self.model.no_sync()
        return contextlib.nullcontext()

    def _settle_buckets(self, micro_batches: Sequence[Any], loss: LossFunction) -> None:
        """Let DDP find its final bucket layout before the first step that counts.

        DDP regroups its gradient buckets after the first backward pass of a process, and where a
        gradient lies in a bucket decides in which order a ring adds the ranks' values. Without this
        the first step after a resume would round differently from the same step undisturbed.
        """
        self._buckets_settled = True
        if not isinstance(self.model, DistributedDataParallel) or not micro_batches:
            return
        generators = state.capture_rank()
        with _kept_buffers(self.module):
            self.module.train()
            with self.autocast():
                value = loss(self.model, to_device(micro_batches[0], self.device))
            torch.autograd.backward(value)
            self.optimizer.zero_grad(set_to_none=True)
        state.apply_rank(generators)


def _nobody_else() -> None:
    """In a loop of one's own there is no run directory that could tell of a newer incarnation."""


def to_device(batch: Any, device: torch.device) -> Any:
    """``batch`` with every tensor in it on ``device``; dicts, lists and tuples are walked."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(value, device) for value in batch)
    return batch


@contextlib.contextmanager
def _kept_buffers(module: nn.Module) -> Iterator[None]:
    kept = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    yield
    with torch.no_grad():
        for buffer, value in kept:
            buffer.copy_(value)
