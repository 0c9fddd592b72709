"""Sharded models in which a module reads the weights of another module."""

import pytest
import torch

from hpcrun.errors import NotTrainable
from tests.support.on_ranks import ranks
from tests.support.training.parallelism import Net, Way, batches, trainer
from tests.support.training.small_training import loss


class Hidden(Net):
    """A model that reads a block's weights by a name that no code analysis can follow."""

    def forward(self, x):
        weight = dict(self.named_parameters())["blocks.0.shrink.weight"]
        return super().forward(x) + weight.sum() * torch.ones_like(x[:, :1])


@ranks(2)
def test_a_shard_that_another_module_reads_is_refused(rank):
    way = Way("fsdp", 2)
    made = trainer(way, rank, make=Hidden)
    with pytest.raises(
        NotTrainable, match=r"^train\.parallel: fsdp gathers the weights of a part"
    ) as told:
        made.training_step(batches(way, rank, 0, 1)[0], loss)
    remedy = "set fsdp.wrap=blocks, or use ddp"
    assert remedy in str(told.value)
