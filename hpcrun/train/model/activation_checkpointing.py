"""Refuse activation checkpointing for a block that writes buffers: recomputation would write them twice."""

from collections.abc import Iterator

from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

from hpcrun.train.errors import NotTrainable


class Buffers:
    """Copies of the buffers of checkpointed blocks in ``module``, taken at construction."""

    def __init__(self, module: nn.Module) -> None:
        self._found = [
            (block, {name: value.detach().clone() for name, value in _buffers(block)})
            for block in module.modules()
            if isinstance(block, CheckpointWrapper)
        ]

    def require_same(self) -> None:
        """Raise NotTrainable if a forward pass has changed one of the buffers since."""
        for block, before in self._found:
            now = dict(_buffers(block))
            changed = [name for name, value in before.items() if not _equal(now.get(name), value)]
            if changed:
                kind = type(block._checkpoint_wrapped_module).__name__
                raise NotTrainable(
                    f"train.activation_checkpointing: {kind} changes its buffer {changed[0]} in "
                    "training, and recomputation would change it twice; set none"
                )


def _buffers(block: CheckpointWrapper) -> Iterator[tuple[str, Tensor]]:
    inner: nn.Module = block._checkpoint_wrapped_module
    return inner.named_buffers()


def _equal(now: Tensor | None, before: Tensor) -> bool:
    """Return True if both hold the same values; NaN equals NaN."""
    if now is None or now.shape != before.shape or now.dtype != before.dtype:
        return False
    return bool(((now == before) | ((now != now) & (before != before))).all())
