"""Random weights from a counter: each rank draws its own shards, with the values of a whole model.

A value depends on the seed, the name of the parameter and the index of the element. So the weights are the
same for any number of ranks, and a rank draws nothing for other ranks. numpy's logarithm may round
differently on a processor without AVX2, or in another version.
"""

import hashlib
import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

_PIECE = 1 << 20
"""Values to draw at a time: some ten megabytes of intermediate results."""

_BLOCK = 4
"""Numbers of 64 bits that Philox makes of a counter."""


@torch.no_grad()
def draw_normal(weight: Tensor, std: float, *, seed: int, name: str) -> None:
    """Set ``weight``, whole or this rank's shard, to values of a normal distribution with mean 0.

    The generator is Philox (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), the method
    that of Box and Muller (1958). Without memory, as on the meta device, nothing happens.

    Args:
        weight: a parameter. A shard must be one of the first dimension.
        std: the standard deviation.
        seed: of the training.
        name: of the parameter in the model.

    Raises:
        ValueError: the shard is one of another dimension.
    """
    local, first = weight, 0
    if isinstance(weight, DTensor):
        shape, offset = compute_local_shape_and_global_offset(
            weight.shape, weight.device_mesh, weight.placements
        )
        if tuple(shape[1:]) != tuple(weight.shape[1:]):
            raise ValueError(f"{name}: is not sharded by its first dimension")
        local, first = weight.to_local(), offset[0] * math.prod(weight.shape[1:])
    # Fake tensors have another type.
    if local.is_meta or type(local) not in (Tensor, nn.Parameter) or not local.numel():
        return
    key = hashlib.sha256(f"{seed}/{name}".encode()).digest()[:16]
    flat = local.view(-1)
    for start in range(0, flat.numel(), _PIECE):
        piece = flat[start : start + _PIECE]
        values = std * _normal(key, first + start, piece.numel())
        piece.copy_(torch.from_numpy(values))


def _normal(key: bytes, first: int, count: int) -> NDArray[np.float32]:
    """Return the values ``first`` to ``first + count`` of a normal distribution: float32 [count]."""
    generator: Any = np.random.Philox(key=np.frombuffer(key, "<u8"))
    generator.advance(first // _BLOCK)
    skipped = first % _BLOCK
    bits = generator.random_raw(skipped + count)[skipped:]
    # The radius needs a number above 0; 2^-24 is the resolution of float32.
    radius = ((bits >> np.uint64(40)) + np.uint64(1)).astype(np.float32) * np.float32(2**-24)
    angle = (bits & np.uint64(0xFFFFFF)).astype(np.float32) * np.float32(2 * np.pi * 2**-24)
    found: NDArray[np.float32] = np.sqrt(np.float32(-2) * np.log(radius)) * np.cos(angle)
    return found
