"""All ranks stop at the same step (invariant 3).

Each rank contributes its own flag to a one-element MAX reduction. The reduction starts at one step and is
read at the next, so that it overlaps the step's work. It uses a separate CPU group: in the group of the
gradients it would have to keep the order of their collectives.
"""

from typing import TYPE_CHECKING, Any

from hpcrun.ranks.signals import StopReason

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class StopAgreement:
    """Turns the ranks' reasons to stop into one reason that every rank reads at the same step.

    Without the agreement, a rank that stops at a signal leaves the other ranks waiting in a collective.
    """

    def __init__(self, group: "ProcessGroup | None", every: int = 1) -> None:
        """Store the arguments.

        Args:
            group: a CPU group of all ranks, such as ``trainer.control_group()``; None for a single rank.
            every: steps between two exchanges.
        """
        self._group = group
        self._every = every
        self._pending: tuple[Any, Any] | None = None

    def exchange(self, step: int, local: StopReason) -> StopReason:
        """Return the reason agreed on at the previous exchange, and start the next with ``local``.

        Collective: every rank calls this with the same ``step``. The next exchange returns a reason that is
        new at this call, on every rank. The all-reduce of one number runs during the step.

        Args:
            step: number of the step.
            local: this rank's reason, such as ``hpcrun.STOP.reason``.

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

    def finish(self) -> None:
        """Wait for the reduction in progress, so that none is in flight when the group is destroyed.

        Raises:
            RuntimeError: another rank has ended (torch.distributed).
        """
        if self._pending is not None:
            self._pending[0].wait()
            self._pending = None
