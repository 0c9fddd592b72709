"""Whether ranks hold alike what is saved once for all of them.

Each rank writes a part of it. DDP keeps the ranks alike; where nobody does, what comes back would be a
mixture that no rank had.
"""

from collections.abc import Callable, Mapping

import xxhash
from torch import Tensor
from torch.distributed.tensor import DTensor

from hpcrun.checkpoint.sharded.collective import Together
from hpcrun.checkpoint.sharded.host_staging import bytes_of
from hpcrun.checkpoint.storage.errors import CheckpointError


def require_alike(
    tensors: Mapping[str, Tensor] | None, alike: Callable[[str], bool], together: Together
) -> bool:
    """Raise CheckpointError, on all ranks, unless all hold the same bits. Collective.

    Args:
        tensors: None on a rank that has none to give.
        alike: which names are taken as alike; sharded tensors are not asked about.

    Returns:
        Whether all ranks had tensors to compare.
    """
    mine = (
        None
        if tensors is None
        else {
            name: xxhash.xxh3_64_intdigest(bytes_of(value.detach().cpu().contiguous()))
            for name, value in tensors.items()
            if alike(name) and not isinstance(value, DTensor)
        }
    )
    everyone = together.gather(mine)
    if None in everyone:
        return False
    first, *others = everyone
    names = sorted(name for name in first if any(first[name] != each.get(name) for each in others))
    if names:
        more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
        raise CheckpointError(
            f"the ranks do not hold the same {names[0]}{more}, and a checkpoint holds it once; wrap the "
            "model in DistributedDataParallel, or begin alike and average the gradients at every step"
        )
    return True
