"""A quick comparison of the ranks' weights after a step: sums of their bits, computed where the weights are.

The ranks of a loop without DDP, or with a forward pass that goes around DDP, train separate models. The first
save would find this only after many steps.
"""

import torch
import xxhash
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from hpcrun.checkpoint.state.tree import named_parameters, replicated
from hpcrun.errors import UserError
from hpcrun.ranks.collective import Ranks

ON_PURPOSE = (
    "; if the weights differ on purpose, as with local SGD, pass same_weights=False to hpcrun.resumable(), "
    "and each rank saves its own"
)
"""The end of the message for a training of :func:`hpcrun.resumable`."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def require_same_weights(
    model: nn.Module, ranks: Ranks, *, steps: int, on_purpose: str = ""
) -> None:
    """Raise UserError on all ranks if a parameter that all ranks hold differs. Collective.

    Sharded parameters, parameters that DDP ignores, and buffers may differ, and are not compared. Models with
    other names or shapes of parameters on some ranks, as the stages of a pipeline, are not compared either.

    Args:
        model: the model of this rank, in DDP or not.
        ranks: all ranks.
        steps: number of finished steps, for the message.
        on_purpose: the end of the message, for weights that may differ.

    Raises:
        UserError: the text names a parameter, and has the remedy.
    """
    if ranks.world_size == 1:
        return
    ignored = _ignored(model)
    mine = {
        name: value.detach()
        for name, value in named_parameters(model)
        if not isinstance(value, DTensor) and name not in ignored
    }
    shapes = [(name, tuple(value.shape), str(value.dtype)) for name, value in mine.items()]
    sums = _sums(list(mine.values()))
    everyone = ranks.gather((_hash(shapes), _hash(sums)))
    if len({found for found, _ in everyone}) > 1 or len({found for _, found in everyone}) == 1:
        return
    all_sums = ranks.gather(sums)
    differing = [
        name
        for name, values in zip(mine, zip(*all_sums, strict=True), strict=True)
        if len({*values}) > 1
    ]
    more = f" (and {len(differing) - 1} more)" if len(differing) > 1 else ""
    remedy = (
        "wrap the model in DistributedDataParallel, or start from the same weights and average the gradients "
        "in each step"
    )
    if replicated(model):
        remedy = (
            "call the model that DistributedDataParallel has returned, and not its attribute module"
        )
    raise UserError(
        f"model.{differing[0]}{more} differs between the ranks after step {steps}, so each rank trains a "
        f"separate model; {remedy}{on_purpose}"
    )


def _ignored(model: nn.Module) -> set[str]:
    for part in model.modules():
        if isinstance(part, DistributedDataParallel):
            return set(part.parameters_to_ignore)
    return set()


def _sums(tensors: list[Tensor]) -> list[int]:
    """Return the sum of the bits of each tensor as integers: it does not depend on the order of addition."""
    sums: dict[torch.device, dict[int, Tensor]] = {}
    for number, value in enumerate(tensors):
        value = torch.view_as_real(value) if value.is_complex() else value
        # A subclass, such as a quantized weight, may have no view of its bits.
        if type(value) is Tensor and value.layout is torch.strided and not value.is_meta:
            bits = value.view(_INTEGERS[value.element_size()])
            sums.setdefault(value.device, {})[number] = bits.sum(dtype=torch.int64)
    found = [0] * len(tensors)
    for parts in sums.values():
        # One transfer for each device.
        for number, total in zip(parts, torch.stack(list(parts.values())).tolist(), strict=True):
            found[number] = total
    return found


def _hash(value: object) -> str:
    return xxhash.xxh3_64_hexdigest(repr(value).encode())
