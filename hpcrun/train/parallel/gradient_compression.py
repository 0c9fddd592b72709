"""Gradient compression in DDP: communication hooks and their state.

PowerSGD (Vogels, Karimireddy, Jaggi, NeurIPS 2019) sends low-rank factors, and adds the approximation error
to the next step's gradients. This error differs between ranks and affects the weights, so it is part of a
rank's checkpoint. The algorithm is torch's own; this module keeps its state correct in warm-up backward
passes, skipped steps, changes of the loss scale, and restarts.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    bf16_compress_hook,
    fp16_compress_hook,
)
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

Kind = Literal["none", "fp16", "bf16", "powersgd"]
_Future: TypeAlias = torch.futures.Future[Tensor]

_OTHER_BUCKETS = (
    "the gradient buckets differ from those in the checkpoint; PowerSGD's error feedback, which it keeps per "
    "bucket, restarts from zero"
)


class Compression:
    """Stateless compression hook: sends gradients in half precision."""

    at_once = False
    """True if :meth:`after_step` must be called before the next backward pass."""

    def __init__(self, hook: Callable[[Any, GradBucket], _Future]) -> None:
        self._hook = hook

    def attach(self, model: DistributedDataParallel) -> None:
        """Compress this model's gradients from now on."""
        model.register_comm_hook(None, self._hook)

    @contextlib.contextmanager
    def idle(self) -> Iterator[None]:
        """Keep the hook's state unchanged in the block, for a backward pass that is not part of a step."""
        yield

    def after_step(self, skipped: bool, scale_factor: float) -> None:
        """Record whether a step was skipped, and the factor by which the loss scale changed."""

    def capture(self) -> dict[str, Any] | None:
        """Return this rank's part of a checkpoint; None if the hook has no state."""
        return None

    def restore(self, own: dict[str, Any] | None, steps: int, device: torch.device) -> str | None:
        """Restore what :meth:`capture` returned after ``steps`` steps; return a note if it is lost."""
        return None


class PowerSGD(Compression):
    """Low-rank compression, after ``start`` steps with uncompressed gradients."""

    at_once = True

    def __init__(self, rank: int, start: int) -> None:
        super().__init__(self._send)
        self._state = PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=start)

    def _send(self, _: None, bucket: GradBucket) -> _Future:
        error = self._state.error_dict.get(bucket.index())
        begun = self._state.iter >= self._state.start_powerSGD_iter
        if begun and error is not None and error.numel() != bucket.buffer().numel():
            # Only after a restart with another torch version or other options of DDP.
            self._forget()
            if dist.get_rank() == 0:
                print(f"hpcrun: {_OTHER_BUCKETS}", file=sys.stderr, flush=True)
        future = powerSGD_hook(self._state, bucket)
        if bucket.buffer().device.type == "cpu":
            # The hook blocks one of gloo's two threads until its reductions finish. Concurrent buckets would
            # deadlock, or reduce in a different order on each rank.
            future.wait()
        return future

    @contextlib.contextmanager
    def idle(self) -> Iterator[None]:
        # At iteration 0 the hook only averages and changes nothing but its iteration counter.
        steps, self._state.iter = self._state.iter, 0
        yield
        self._state.iter = steps

    def after_step(self, skipped: bool, scale_factor: float) -> None:
        if skipped:
            # By now the non-finite values are in the error and the factors of every rank.
            self._forget()
        elif scale_factor != 1.0:
            for error in self._state.error_dict.values():
                error.mul_(scale_factor)

    def capture(self) -> dict[str, Any] | None:
        state = self._state
        kind, keys, position, has_gauss, gauss = cast(tuple[Any, ...], state.rng.get_state())
        return {
            "rank": state.matrix_approximation_rank,
            "errors": _to(state.error_dict, torch.device("cpu")),
            "ps": _to(state.p_memory_dict, torch.device("cpu")),
            "qs": _to(state.q_memory_dict, torch.device("cpu")),
            "generator": [str(kind), keys.tolist(), int(position), int(has_gauss), float(gauss)],
        }

    def restore(self, own: dict[str, Any] | None, steps: int, device: torch.device) -> str | None:
        state = self._state
        state.iter = steps
        self._forget()
        if own is not None and own["rank"] == state.matrix_approximation_rank:
            state.error_dict.update(_to(own["errors"], device))
            state.p_memory_dict.update(_to(own["ps"], device))
            state.q_memory_dict.update(_to(own["qs"], device))
            state.rng.set_state(tuple(own["generator"]))
            return None
        if steps <= state.start_powerSGD_iter:
            return None  # Compression had not started yet.
        return (
            "PowerSGD's error feedback is not restored: it depends on the rank and on train.powersgd_rank, "
            "and one of the two has changed; it restarts from zero"
        )

    def _forget(self) -> None:
        self._state.error_dict.clear()
        self._state.p_memory_dict.clear()
        self._state.q_memory_dict.clear()


def compression(kind: Kind, *, rank: int = 1, start: int = 1000) -> Compression | None:
    """Make a gradient compression for ``DistributedAMPTrainer(compression=…)``; None for ``none``.

    Source: ``torch.distributed.algorithms.ddp_comm_hooks``; PowerSGD: Vogels, Karimireddy, Jaggi, NeurIPS
    2019.

    Args:
        kind: ``fp16`` and ``bf16`` all-reduce gradients in half precision; ``powersgd`` sends low-rank
            factors.
        rank: PowerSGD: rank of the approximation.
        start: PowerSGD: number of first steps without compression, 2 or more.
    """
    if kind == "powersgd":
        return PowerSGD(rank, start)
    if kind == "fp16":
        return Compression(_in_fp16)
    if kind == "bf16":
        return Compression(_in_bf16)
    return None


def _in_fp16(_: None, bucket: GradBucket) -> _Future:
    return fp16_compress_hook(_all_ranks(), bucket)


def _in_bf16(_: None, bucket: GradBucket) -> _Future:
    # Under another function name: DDP accepts torch's bf16 hook on GPUs only, but gloo supports bf16 too.
    return bf16_compress_hook(_all_ranks(), bucket)


def _all_ranks() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None  # DDP needs a process group
    return world


def _to(tensors: dict[int, Tensor], device: torch.device) -> dict[int, Tensor]:
    return {index: tensor.detach().to(device, copy=True) for index, tensor in tensors.items()}
