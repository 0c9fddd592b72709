"""All ranks stop at the same step (invariant 3).

Each rank contributes its own flag to a one-element MAX reduction. The reduction starts at one step and is
read at the next, so that it overlaps the step's work. It uses a separate CPU group: in the group of the
gradients it would have to keep the order of their collectives.
"""

from typing import TYPE_CHECKING, Any

from hpcrun.lifecycle.signals import StopReason

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class StopAgreement:
    """Turns local reasons to stop into one that every rank reads at the same step."""

    def __init__(self, group: "ProcessGroup | None", every: int = 1) -> None:
        """``group``: a control group of all ranks, or None for a single rank; ``every``: in steps."""
        self._group = group
        self._every = every
        self._pending: tuple[Any, Any] | None = None

    def exchange(self, step: int, local: StopReason) -> StopReason:
        """Return the reason agreed on at the previous exchange, and start the next with ``local``.

        Collective: every rank calls it with the same ``step``. The next exchange returns a reason that is new
        at this call, on every rank.

        Raises:
            RuntimeError: another rank has ended (torch.distributed).
        """
        if self._group is None:
            return local
        if step % self._every:
            return StopReason.NONE
        import torch
        import torch.distributed as dist

        agreed = StopReason.NONE
        if self._pending is not None:
            work, value = self._pending
            work.wait()
            agreed = StopReason(int(value[0]))
        value = torch.tensor([int(local)], dtype=torch.int32)
        work = dist.all_reduce(value, dist.ReduceOp.MAX, group=self._group, async_op=True)
        self._pending = (work, value)
        return agreed

    def settle(self) -> None:
        """Wait for the reduction in progress, so that none is in flight when the group is destroyed."""
        if self._pending is not None:
            self._pending[0].wait()
            self._pending = None
