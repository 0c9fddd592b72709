"""EvenBatches: all ranks train until each has used its batches, also if their numbers differ."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hpcrun.ranks.collective import Ranks
from hpcrun.train.step.weighting import Weight

_END = object()


class EvenBatches:
    """Decides before each step which ranks have a batch, and gives the other ranks the weight zero.

    A rank without a batch takes part with its last batch, since the ranks' collectives belong together. A
    rank that never had a batch gets the first batch of another rank.

    Attributes:
        lacking: True while this rank has no batch.
        present: number of ranks with a batch in this step; None outside of a loop.
    """

    def __init__(self) -> None:
        self.lacking = False
        self.present: int | None = None

    def over(self, batches: Iterable[Any], ranks: Ranks) -> Iterator[Any]:
        """Yield the batches of this rank, and a substitute while another rank has batches. Collective."""
        iterator, last = iter(batches), _END
        try:
            while True:
                batch = next(iterator, _END)
                self.lacking = batch is _END
                self.present = _count(not self.lacking, ranks)
                if not self.present:
                    return
                if last is _END:
                    last = _first(batch, ranks)
                last = last if self.lacking else batch
                yield last
        finally:
            self.lacking, self.present = False, None

    def weights(
        self, weights: Sequence[Weight] | None, total: float | None, parts: int
    ) -> tuple[Sequence[Weight] | None, float | None]:
        """Return the weights of this rank's micro-batches in this step, and their sum over all ranks.

        Without weights, each rank with a batch counts the same. A rank without a batch has the weight 0.
        """
        if self.present is None:
            return weights, total
        if self.lacking:
            # A tensor: its zero also replaces a loss that is NaN.
            zeros = [torch.zeros(())] * parts
            return zeros, float(self.present) if weights is None else total
        if weights is None:
            return [1 / parts] * parts, float(self.present)
        return weights, total


def _count(has: bool, ranks: Ranks) -> int:
    """Return the number of ranks that have a batch. Collective, on the control group."""
    count = torch.tensor([int(has)])
    if ranks.world_size > 1:
        dist.all_reduce(count, group=ranks.group)
    return int(count)


def _first(batch: Any, ranks: Ranks) -> Any:
    """Return this rank's first batch, or that of the lowest rank that has one. Collective."""
    lacking = ranks.gather(batch is _END)
    if not any(lacking):
        return batch
    source = lacking.index(False)
    box = [_on_cpu(batch) if ranks.rank == source else None]
    dist.broadcast_object_list(box, src=source, group=ranks.group)
    return box[0] if batch is _END else batch


def _on_cpu(batch: Any) -> Any:
    from torch.utils._pytree import tree_map_only

    return tree_map_only(Tensor, Tensor.cpu, batch)
