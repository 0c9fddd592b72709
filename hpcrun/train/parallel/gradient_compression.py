"""How gradients are compressed on their way between ranks: DDP's communication hooks, and their memory.

PowerSGD (Vogels, Karimireddy, Jaggi, NeurIPS 2019) sends low-rank factors, and adds what these left out
to the next step's gradients. That error is another on each rank and decides the weights, so it is part
of a rank's checkpoint. The work is torch's own; here it is kept right over a backward pass that does not
count, a skipped step, a change of the loss scale, and a restart.
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
    "gradients lie in other buckets than when the checkpoint was saved; PowerSGD's error feedback, which "
    "is kept for each, starts anew"
)


class Compression:
    """A hook that remembers nothing: each gradient is sent in half precision."""

    at_once = False
    """Whether :meth:`after_step` must be told of a step before the next backward pass."""

    def __init__(self, hook: Callable[[Any, GradBucket], _Future]) -> None:
        self._hook = hook

    def attach(self, model: DistributedDataParallel) -> None:
        """Compress this model's gradients from here on."""
        model.register_comm_hook(None, self._hook)

    @contextlib.contextmanager
    def idle(self) -> Iterator[None]:
        """Around a backward pass that does not count."""
        yield

    def after_step(self, skipped: bool, scale_factor: float) -> None:
        """Learn what became of a step, and by what the loss scale was multiplied."""

    def capture(self) -> dict[str, Any] | None:
        """This rank's own part of a checkpoint; None: there is none."""
        return None

    def restore(self, own: dict[str, Any] | None, steps: int, device: torch.device) -> str | None:
        """Put back what :meth:`capture` gave ``steps`` steps into the training; a line if that is lost."""
        return None


class PowerSGD(Compression):
    """Low-rank factors, after ``start`` steps with whole gradients."""

    at_once = True

    def __init__(self, rank: int, start: int) -> None:
        super().__init__(self._send)
        self._state = PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=start)

    def _send(self, _: None, bucket: GradBucket) -> _Future:
        error = self._state.error_dict.get(bucket.index())
        begun = self._state.iter >= self._state.start_powerSGD_iter
        if begun and error is not None and error.numel() != bucket.buffer().numel():
            # Only after a restart with another torch, or other options of DDP.
            self._forget()
            if dist.get_rank() == 0:
                print(f"hpcrun: {_OTHER_BUCKETS}", file=sys.stderr, flush=True)
        future = powerSGD_hook(self._state, bucket)
        if bucket.buffer().device.type == "cpu":
            # The hook waits for reductions in gloo's own threads, of which there are two: buckets under
            # way at once would wait for each other, and reduce in another order on each rank.
            future.wait()
        return future

    @contextlib.contextmanager
    def idle(self) -> Iterator[None]:
        # At step 0 the hook only averages, and remembers nothing but that it was called.
        steps, self._state.iter = self._state.iter, 0
        yield
        self._state.iter = steps

    def after_step(self, skipped: bool, scale_factor: float) -> None:
        if skipped:
            # What was not finite is in every rank's error and factors by now.
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
            return None  # It had not begun.
        return (
            "PowerSGD's error feedback is not restored, for it belongs to each rank and to a rank of "
            "approximation, and one of them has changed; it starts anew"
        )

    def _forget(self) -> None:
        self._state.error_dict.clear()
        self._state.p_memory_dict.clear()
        self._state.q_memory_dict.clear()


def compression(kind: Kind, *, rank: int = 1, start: int = 1000) -> Compression | None:
    """The compression of that name; ``rank`` and ``start`` are PowerSGD's. None: none."""
    if kind == "powersgd":
        return PowerSGD(rank, start)
    if kind == "fp16":
        return Compression(_in_fp16)
    if kind == "bf16":
        return Compression(_in_bf16)
    return None


def _in_fp16(_: None, bucket: GradBucket) -> _Future:
    return fp16_compress_hook(_everybody(), bucket)


def _in_bf16(_: None, bucket: GradBucket) -> _Future:
    # By a name of our own: DDP refuses torch's on all but GPUs, though gloo can do it as well.
    return bf16_compress_hook(_everybody(), bucket)


def _everybody() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None  # DDP would not be there
    return world


def _to(tensors: dict[int, Tensor], device: torch.device) -> dict[int, Tensor]:
    return {index: tensor.detach().to(device, copy=True) for index, tensor in tensors.items()}
