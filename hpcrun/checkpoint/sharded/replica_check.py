"""Check that tensors which are saved once have the same value on all ranks.

Each rank writes some of these tensors. DDP keeps them the same. Without DDP the ranks may differ, and the
checkpoint would mix the values of several ranks.
"""

from collections.abc import Callable, Mapping

import xxhash
from torch import Tensor
from torch.distributed.tensor import DTensor

from hpcrun.checkpoint.sharded.host_staging import bytes_of
from hpcrun.checkpoint.storage.errors import CheckpointError
from hpcrun.ranks.collective import Ranks


def require_alike(
    tensors: Mapping[str, Tensor] | None, alike: Callable[[str], bool], ranks: Ranks
) -> bool:
    """Raise CheckpointError on all ranks unless all have the same bits. Collective.

    Args:
        tensors: this rank's tensors by name; None if it has none.
        alike: returns True for names to compare; sharded tensors are skipped.

    Returns:
        True if all ranks had tensors to compare.
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
    everyone = ranks.gather(mine)
    if None in everyone:
        return False
    first, *others = everyone
    names = sorted(name for name in first if any(first[name] != each.get(name) for each in others))
    if names:
        more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
        raise CheckpointError(
            f"{names[0]}{more} differs between the ranks, but a checkpoint stores it once; wrap the model "
            "in DistributedDataParallel, or start from the same weights and average the gradients each step"
        )
    return True
