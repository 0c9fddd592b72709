"""Sharded models in which a module reads the weights of another module."""

import pytest
import torch
from torch.nn import functional as F

from hpcrun.errors import NotTrainable
from hpcrun.tasks.gpt import GPT
from hpcrun.tasks.options import LanguageModelShape
from tests.on_ranks import ranks
from tests.train.parallelism import Net, Way, batches, trainer
from tests.train.small_training import loss


def bytes_loss(model, text):
    """Return the mean negative log-likelihood of the next byte."""
    return F.cross_entropy(model(text[:, :-1]).flatten(0, 1).float(), text[:, 1:].flatten())


@ranks(2)
def test_the_shipped_gpt_trains_the_same_sharded_by_size(rank):
    shape = LanguageModelShape(layers=2, heads=2, width=16)
    texts = torch.randint(0, 256, (4, 2, 3, 9), generator=torch.Generator().manual_seed(1))

    def losses(way):
        made = trainer(way, rank, make=lambda _: GPT(shape))
        return [made.training_step([text[rank]], bytes_loss).loss.item() for text in texts]

    copies = losses(Way("ddp", 2))
    assert losses(Way("fsdp", 2, wrap="size")) == pytest.approx(copies, rel=1e-5)


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
    remedy = "set fsdp.wrap=classes without this part, or use ddp"
    assert remedy in str(told.value)
