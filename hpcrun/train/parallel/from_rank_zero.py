"""Broadcast of a tensor of any layout and dtype, also with NCCL."""

import torch
import torch.distributed as dist
from torch import Tensor


@torch.no_grad()
def copy_from_rank_zero(value: Tensor) -> None:
    """Replace the values of ``value`` on all ranks by rank 0's, in place. Collective on the default group.

    NCCL refuses tensors that are not contiguous, such as a transposed filter bank, and does not know int16
    and uint16. So the values are sent as bytes, through a contiguous copy if necessary.
    """
    dense = value.contiguous()
    dist.broadcast(dense.reshape(-1).view(torch.uint8), src=0)
    if dense is not value:
        value.copy_(dense)
