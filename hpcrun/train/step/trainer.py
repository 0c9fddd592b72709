"""DistributedAMPTrainer: optimizer steps on many ranks, by DDP, FSDP or DataParallel.

AMPTrainer and DistributedAMPTrainer also work in your own loop; hpcrun's loop uses only their public methods.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hpcrun.checkpoint.outcome import Restored
from hpcrun.checkpoint.sharded.engine import CheckpointEngine
from hpcrun.checkpoint.sharded.same_weights import require_same_weights
from hpcrun.checkpoint.state.generators import kept_generators
from hpcrun.checkpoint.state.hook_state import HookStates, kept_hooks
from hpcrun.checkpoint.state.training import RankPart
from hpcrun.config import AMPConfig
from hpcrun.config.training import FSDP
from hpcrun.devices import accelerator, vendor
from hpcrun.errors import UserError
from hpcrun.ranks.collective import Ranks
from hpcrun.ranks.distributed import Backend, DistributedConfig
from hpcrun.train.data.micro_batches import MicroBatches
from hpcrun.train.model.checks import kept_buffers, kept_gradients, require_all_used
from hpcrun.train.model.prepare import Preparation, prepare
from hpcrun.train.parallel import process_group
from hpcrun.train.parallel.choose import Parallel, strategy
from hpcrun.train.parallel.comm_hooks import CommHook, Compression, ErrorFeedback
from hpcrun.train.parallel.ended_ranks import EndedRanks, watch_ends
from hpcrun.train.parallel.given_wrapper import unwrapped
from hpcrun.train.parallel.strategies import Strategy
from hpcrun.train.step.amp_trainer import AMPTrainer
from hpcrun.train.step.arguments import MakeOptimizer
from hpcrun.train.step.checkpoint_file import is_file_form
from hpcrun.train.step.precision import LossFunction, StepResult, to_device

__all__ = ["AMPTrainer", "DistributedAMPTrainer", "LossFunction", "StepResult"]


class DistributedAMPTrainer(AMPTrainer):
    """AMPTrainer for many ranks, with a choice of parallelism: DDP, FSDP2 or DataParallel.

    With more than one rank, call :meth:`setup_distributed` and :meth:`wrap_model` first. If the program has
    made its process group, the first step wraps the model.
    :meth:`training_step` averages gradients over ranks at the last micro-batch. Its ``weights`` are this
    rank's: give weights on all ranks or on none. Its first call in a process computes ``loss`` once more
    than it takes steps, and then restores gradients, buffers and random generators.

    Sources: ``torch.nn.parallel.DistributedDataParallel`` (Li et al. 2020, arXiv:2006.15704) and
    ``torch.distributed.fsdp.fully_shard`` (Zhao et al. 2023, arXiv:2304.11277).

    Attributes:
        distributed: rank, world size and rendezvous address of this process.
        names_ended_ranks: False if something else notices that a rank has ended, such as hpcrun's watchdog.
    """

    names_ended_ranks = True

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | MakeOptimizer | AMPConfig | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        backend: Backend | None = None,
        device_ids: Sequence[int] | None = None,
        *,
        config: AMPConfig | None = None,
        distributed: DistributedConfig | None = None,
        amp: AMPConfig | None = None,
        clip_norm: float | None = None,
        scheduler: Callable[[Optimizer], LRScheduler] | None = None,
        device: torch.device | str | None = None,
        ema: float | None = None,
        parallel: Parallel = "ddp",
        fsdp: FSDP | None = None,
        preparation: Preparation | None = None,
        comm_hook: CommHook | None = None,
        powersgd_rank: int = 1,
        powersgd_start: int = 1000,
        accumulation_steps: int = 1,
        learning_rate: float | None = None,
    ) -> None:
        """Take the arguments of :class:`AMPTrainer`; with ``fsdp`` the model moves to the device in wrapping.

        Args:
            model: the model to train, with the same architecture on every rank. A model that the program has
                put in DistributedDataParallel keeps this wrapper, with its options and hooks.
            optimizer: as for :class:`AMPTrainer`; FSDP needs a function, or None.
            rank: as for :meth:`DistributedConfig.from_values`, like the next three; without ``distributed``.
            world_size: number of ranks.
            backend: ``nccl`` or ``gloo``.
            device_ids: this rank's GPU, as ``[0]``; all GPUs of the process for ``parallel="dp"``.
            config: as for :class:`AMPTrainer`.
            amp: as for :class:`AMPTrainer`.
            clip_norm: as for :class:`AMPTrainer`; the norm is over all ranks.
            scheduler: as for :class:`AMPTrainer`.
            device: as for :class:`AMPTrainer`; None: the GPU of ``distributed``, or the CPU.
            ema: as for :class:`AMPTrainer`.
            distributed: rank and world size; by default those of the process group if the program has
                made one, otherwise the launcher's variables.
            parallel: ``ddp``, ``fsdp``, ``single``, or ``dp`` (one process for several GPUs,
                ``torch.nn.DataParallel``). On a single rank, ddp and fsdp are the same as single.
            fsdp: sharding options for ``parallel="fsdp"``.
            preparation: activation checkpointing and compilation.
            comm_hook: how DDP compresses gradients: ``fp16``, ``bf16`` or ``powersgd``; None or ``none``: not
                at all. Your own hook: ``wrap_model().register_comm_hook(state, hook)``, before
                :meth:`load_checkpoint`.
            powersgd_rank: rank of PowerSGD's factors.
            powersgd_start: steps with whole gradients before PowerSGD, at least 2.
            accumulation_steps: as for :class:`AMPTrainer`. Ranks communicate in the last call.
            learning_rate: as for :class:`AMPTrainer`.

        Raises:
            ValueError: ``distributed`` and one of rank, world_size, backend and device_ids; ``device_ids``
                without a GPU; another value of ``parallel``; ``single`` or ``dp`` with several ranks; an
                optimizer of parameters that FSDP will replace; a ``comm_hook`` without DDP; a model that is
                sharded, or in a wrapper that the other arguments contradict.
            ClusterError: the launcher's variables are missing or contradict each other (without
                ``distributed``).
        """
        self._devices = None if parallel != "dp" or not device_ids else tuple(device_ids)
        if self._devices:
            device_ids = self._devices[:1]
        elif device_ids and not accelerator.count():
            raise ValueError(
                f"device_ids={list(device_ids)}: this process sees no GPU; omit device_ids to train on the "
                "CPU, or check CUDA_VISIBLE_DEVICES and the build of torch"
            )
        # An explicit world size of 1 is intended: each rank may train its own small model.
        given = (rank, world_size, backend, device_ids)
        if distributed is None and any(value is not None for value in given):
            distributed = DistributedConfig.from_values(
                rank=rank, world_size=world_size, backend=backend, device_ids=device_ids
            )
        elif any(value is not None for value in given):
            raise ValueError(
                "distributed describes this rank already; leave out rank, world_size, backend and device_ids"
            )
        self._single_by_choice = distributed is not None and distributed.world_size == 1
        self.distributed = distributed or DistributedConfig.from_env()
        self._parallel, self._fsdp = parallel, fsdp or FSDP()
        self._preparation = preparation or Preparation()
        self._compression = Compression(comm_hook or "none", powersgd_rank, powersgd_start)
        if device is None:
            ids = self.distributed.device_ids
            device = accelerator.device(ids[0]) if ids else torch.device("cpu")
        inside, self._given = self._unwrapped(model)
        super().__init__(
            inside,
            optimizer,
            amp=amp,
            clip_norm=clip_norm,
            scheduler=scheduler,
            device=device,
            ema=ema,
            config=config,
            accumulation_steps=accumulation_steps,
            learning_rate=learning_rate,
        )
        self._control: Ranks | None = None
        self._ends: EndedRanks | None = None
        self._wrapped = False
        self._buckets_final = False
        self._compared = 0  # steps after which the ranks have compared their weights
        self._hooks, self._feedback = HookStates(()), ErrorFeedback(self.module)

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.distributed.world_size

    @property
    def _needs_wrapping(self) -> bool:
        """True if also a single rank must wrap its model."""
        return self._parallel == "dp" or self._preparation.checkpointing != "none"

    @property
    def _replays_graphs(self) -> bool:
        return self._preparation.compile in vendor.WITHOUT_GRAPHS

    @property
    def is_main_process(self) -> bool:
        """True on rank 0."""
        return self.distributed.rank == 0

    @property
    def parallel(self) -> Parallel:
        """The parallelism of the ranks."""
        return self._parallel

    def setup_distributed(self) -> DistributedConfig:
        """Join the process group, unless there is one; return the description of this rank. Collective.

        Raises:
            ClusterError: the description contradicts itself, this machine or the existing group.
        """
        self.distributed = process_group.setup_distributed(self.distributed)
        return self.distributed

    def wrap_model(self, model: nn.Module | None = None) -> nn.Module:
        """Prepare and wrap the model, and return the module for forward passes. Collective.

        Args:
            model: None, the model of this trainer, or before the first wrapping another model to train.

        Raises:
            UserError: the model lacks something that the preparation or the sharding needs. Or ``model`` is
                another model, and the trainer already has an optimizer or a wrapped model.
            ClusterError: the process group has another rank or size than ``distributed``.
        """
        self._require_same_group()
        if model is not None and model is not self.module and model is not self.model:
            inside, self._given = self._unwrapped(model)
            if inside is not self.module:
                self._replace(inside)
        if not self._wrapped:
            self._strategy.remember(self.module)
            prepare(self.module, self._preparation)
            self.model = self._given or self._strategy.wrap(self.module, self._preparation.compile)
            self._hooks = HookStates([self.model], late=True)
            self._feedback = ErrorFeedback(self.model)
            self._wrapped = True
        return self.model

    def _unwrapped(self, model: nn.Module) -> tuple[nn.Module, nn.Module | None]:
        compresses = self._compression.hook != "none"
        return unwrapped(model, self._parallel, compresses, self.distributed.world_size)

    def _replace(self, model: nn.Module) -> None:
        """Train ``model`` instead of the model of the constructor."""
        made = isinstance(self._make_optimizer, Optimizer) or self._optimizer is not None
        if self._wrapped or made:
            has = "wrapped its model" if self._wrapped else "an optimizer of its model"
            raise UserError(
                f"wrap_model: this trainer has {has}, and this is another model; give the model to "
                "DistributedAMPTrainer(model, ...), and call wrap_model() once"
            )
        self.module = self.model = self._strategy.place(model, self.device)

    def enable_gradient_checkpointing(self) -> None:
        """Recompute activations in the backward pass, to save memory (``torch.utils.checkpoint``).

        Call it before :meth:`wrap_model`. ``preparation=Preparation(checkpointing=...)`` has more choices.

        Raises:
            UserError: the model is already wrapped, or the training has begun.
        """
        if self._wrapped or self._buckets_final:
            raise UserError(
                "enable_gradient_checkpointing: the training has begun; call it before wrap_model() and the "
                "first training step"
            )
        self._preparation = replace(self._preparation, checkpointing="full")

    def load_checkpoint(
        self, where: Path | str | CheckpointEngine, skip: Collection[int] = ()
    ) -> Restored | None:
        """Restore as :meth:`AMPTrainer.load_checkpoint`; with communication hooks, wrap first. Collective.

        Args:
            where: a folder of checkpoints, a ``.pt`` or ``.pth`` file, or an engine made for a folder.
            skip: steps of the folder to ignore.

        Returns:
            As :meth:`AMPTrainer.load_checkpoint`.

        Raises:
            CheckpointError: checkpoints exist but none is valid, or the newest does not fit the model.
            RuntimeError: the parallelism is FSDP, and ``wrap_model()`` was not called.
        """
        hooks = self._compression.hook != "none" or self._given is not None
        if hooks and not self._wrapped and dist.is_initialized() and not is_file_form(where):
            # A folder has the state of the hooks, which the wrapped model gets.
            self.wrap_model()
        return super().load_checkpoint(where, skip)

    def control_group(self) -> Any:
        """Return a CPU process group for decisions and checkpoints, apart from the gradients' collectives.

        The first call is collective. A single rank gets None.
        """
        return self.control_ranks().group

    def control_ranks(self) -> Ranks:
        """Return this rank's view of :meth:`control_group`. The first call is collective."""
        if self._control is None:
            self._control = process_group.control_ranks(self.distributed)
        return self._control

    def _choose_strategy(self) -> Strategy:
        return strategy(
            self._parallel, self.distributed, self.amp, self._fsdp, self._compression, self._devices
        )

    def _rank_parts(self) -> dict[str, RankPart]:
        return {**super()._rank_parts(), "hooks": self._hooks.part}

    def _after_step(self, skipped: bool) -> None:
        super()._after_step(skipped)
        self._feedback.after_step(self.gate, skipped)

    def _require_same_group(self) -> None:
        if not self._single_by_choice:
            process_group.require_same_group(self.distributed)

    def _checkpoint_ranks(self) -> Ranks:
        self._require_same_group()
        return self.control_ranks()

    def _file_ranks(self) -> Ranks:
        # Before the wrapping there may be no group yet.
        return self._checkpoint_ranks() if self._wrapped and self.is_distributed else Ranks()

    def _explain(self, error: Exception) -> None:
        line = self._ends.line() if self._ends is not None else None
        if line is not None and not isinstance(error, UserError):
            raise UserError(line) from error

    def _require_final_parameters(self) -> None:
        if self._strategy.replaces_parameters and not self._wrapped:
            raise RuntimeError(
                "FSDP replaces the model's parameters: call setup_distributed() and wrap_model() before "
                "load_checkpoint(), save_checkpoint() and any other use of the optimizer or the weights"
            )

    def _update(self, total: Tensor) -> StepResult:
        result = super()._update(total)
        # FSDP gives each rank another part of the weights.
        compares = self.is_distributed and not self._strategy.replaces_parameters
        if compares and self._compared < 2 and result.updated:
            # Also in the second step: a warm-up may begin with a rate of zero.
            self._compared += 1
            require_same_weights(self.model, self.control_ranks(), steps=self._compared)
        return result

    def _before_step(self, micro_batches: MicroBatches, loss: LossFunction) -> None:
        if self._ends is not None:
            self._ends.begin_step()
        if self._buckets_final:
            self._feedback.before_step(self.gate)
            return
        self._require_same_group()
        if self.is_distributed and not dist.is_initialized():
            raise RuntimeError(
                f"the {self.distributed.world_size} ranks would each train a separate model: call "
                "setup_distributed() and wrap_model() before training_step()"
            )
        if not self._wrapped and (self.is_distributed or self._needs_wrapping):
            self.wrap_model()
        if self.is_distributed and self.names_ended_ranks:
            self._ends = watch_ends()
            if self._ends is not None:
                self._ends.begin_step()
        self._buckets_final = True
        forwards = [partial(self._forward, batch, loss) for batch in micro_batches]
        if self._strategy.changes_buckets(self.model):
            # DDP finds its final bucket layout before the first optimizer step.
            with kept_hooks(self.model):
                finalize_buckets(self.module, forwards[0], ranks=self.control_ranks())
        self._hooks.begin()
        self._feedback.before_step(self.gate)
        if self._strategy.collective_forward:
            self._strategy.compare(self.control_ranks(), self.model, forwards)

    def _forward(self, batch: Any, loss: LossFunction) -> Tensor:
        self._leave_evaluation()
        with self.autocast():
            return loss(self.model, to_device(batch, self.device))


def finalize_buckets(module: nn.Module, forward: Callable[[], Tensor], *, ranks: Ranks) -> None:
    """Run one forward and backward pass that changes nothing but DDP's bucket layout. Collective.

    DDP rearranges its gradient buckets after the first backward pass of a process, and a gradient's position
    in a bucket decides the order in which a ring all-reduce adds the ranks' values. Without this pass, the
    first step after a resume would round differently from the same step of an uninterrupted run.

    Raises:
        UserError: the loss does not depend on all parameters.
    """
    with kept_generators(), kept_buffers(module), kept_gradients(module):
        value = forward()
        ranks.together(lambda: require_all_used(value, module))
        torch.autograd.backward(value)
