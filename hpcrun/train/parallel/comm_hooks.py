"""Compression of the gradients that DDP sends: torch's communication hooks fp16, bf16 and PowerSGD.

Sources: ``torch.distributed.algorithms.ddp_comm_hooks``; PowerSGD: Vogels, Karimireddy, Jaggi, NeurIPS 2019,
arXiv:1905.13727. The state of a hook is in the checkpoint (``hpcrun/checkpoint/state/hook_state.py``).
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    bf16_compress_hook,
    fp16_compress_hook,
)
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from hpcrun.train.step.gate import StepGate

CommHook = Literal["none", "fp16", "bf16", "powersgd"]


@dataclass(frozen=True)
class Compression:
    """How DDP compresses gradients.

    Attributes:
        hook: ``none``; ``fp16`` or ``bf16``: gradients are sent in half precision; ``powersgd``: as factors
            of a low rank, and what these lack is added to the next step's gradients.
        rank: PowerSGD: the rank of the factors.
        start: PowerSGD: steps with whole gradients at the start, at least 2.

    Raises:
        ValueError: ``hook`` is another word, or ``rank`` or ``start`` is too small.
    """

    hook: CommHook = "none"
    rank: int = 1
    start: int = 1000

    def __post_init__(self) -> None:
        if self.hook not in get_args(CommHook):
            raise ValueError(
                f"comm_hook={self.hook!r}: use one of {', '.join(get_args(CommHook))}, or register a hook of "
                "your own with wrap_model().register_comm_hook(state, hook)"
            )
        if self.rank < 1 or self.start < 2:
            raise ValueError(
                f"powersgd_rank={self.rank}, powersgd_start={self.start}: use at least 1 and at least 2"
            )

    def require_ddp(self, parallel: str) -> None:
        """Raise ValueError if ``parallel`` has no place for a hook."""
        if self.hook == "none" or parallel == "ddp":
            return
        remedy = (
            "set reduce_dtype of FSDP (fsdp.reduce_dtype) to bf16"
            if parallel == "fsdp"
            else "remove comm_hook"
        )
        raise ValueError(
            f"comm_hook={self.hook} is a hook of DDP, and parallel={parallel} has none; use "
            f"parallel=ddp, or {remedy}"
        )

    def attach(self, model: DistributedDataParallel) -> None:
        """Compress the gradients of ``model`` from here on."""
        if self.hook == "fp16":
            model.register_comm_hook(None, fp16_hook)
        elif self.hook == "bf16":
            model.register_comm_hook(None, bf16_hook)
        elif self.hook == "powersgd":
            # Without the epsilon, a layer without a gradient gives 0 / 0.
            state = PowerSGDState(
                None,
                matrix_approximation_rank=self.rank,
                start_powerSGD_iter=self.start,
                orthogonalization_epsilon=1e-8,
            )
            model.register_comm_hook(state, powersgd_hook)


def fp16_hook(_: None, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Send a bucket in float16; see ``fp16_compress_hook``."""
    return fp16_compress_hook(_everybody(), bucket)


def bf16_hook(_: None, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Send a bucket in bfloat16; see ``bf16_compress_hook``."""
    # DDP refuses torch's own function on the CPU, by its name, but gloo supports bfloat16.
    return bf16_compress_hook(_everybody(), bucket)


def powersgd_hook(state: PowerSGDState, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Send a bucket as factors of a low rank; see ``powerSGD_hook``."""
    sent = powerSGD_hook(state, bucket)
    if bucket.buffer().device.type == "cpu":
        # Gloo's threads start the second and third collective. With several buckets, each rank would have
        # another order of collectives.
        sent.wait()
    return sent


def _everybody() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None  # DDP needs a group
    return world


class ErrorFeedback:
    """Keeps the error feedback of PowerSGD valid over skipped steps and changes of the loss scale.

    Args:
        model: the model in DDP, or any other module, for which there is nothing to do.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._scale = model, 1.0

    def before_step(self, gate: StepGate) -> None:
        """Read the decision on the last step, which may reset the errors, and note the loss scale."""
        if self._states():
            gate.resolve_pending()
            self._scale = gate.scaler.get_scale()

    def after_step(self, gate: StepGate, skipped: bool) -> None:
        """Forget errors that are not finite; scale the others as the next gradients."""
        for state in self._states():
            if skipped:
                # Infinite values are in the errors and factors of all ranks by now.
                state.error_dict.clear()
                state.p_memory_dict.clear()
                state.q_memory_dict.clear()
            elif (scale := gate.scaler.get_scale()) != self._scale:
                for error in state.error_dict.values():
                    error.mul_(scale / self._scale)

    def _states(self) -> list[PowerSGDState]:
        hooks = getattr(self._model, "_comm_hooks", ())
        return [state for _, state in hooks if isinstance(state, PowerSGDState)]
