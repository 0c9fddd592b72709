"""Sharded models in which a module reads the weights of another module. Run by ``equivalence``."""

import torch
from torch.nn import functional as F

from hpcrun.tasks.gpt import GPT
from hpcrun.tasks.options.language_model import LanguageModelShape
from tests.train.sharing import Net, Way, batches, loss, trainer


def bytes_loss(model, text):
    """Return the mean negative log-likelihood of the next byte."""
    return F.cross_entropy(model(text[:, :-1]).flatten(0, 1).float(), text[:, 1:].flatten())


def the_shipped_gpt_by_size(rank):
    """Return the losses of DDP, and of FSDP with a tied embedding that could be a unit."""
    shape = LanguageModelShape(layers=2, heads=2, width=16)
    texts = torch.randint(0, 256, (4, 2, 3, 9), generator=torch.Generator().manual_seed(1))
    found = []
    for way in (Way("ddp", 2), Way("fsdp", 2, wrap="size")):
        made = trainer(way, rank, make=lambda _: GPT(shape))
        found.append([made.training_step([text[rank]], bytes_loss).loss.item() for text in texts])
    return found


class Hidden(Net):
    """A model that reads a block's weights by a name that no code analysis can follow."""

    def forward(self, x):
        weight = dict(self.named_parameters())["blocks.0.shrink.weight"]
        return super().forward(x) + weight.sum() * torch.ones_like(x[:, :1])


def a_use_that_is_found_in_the_step(rank):
    """Return the error of the step."""
    way = Way("fsdp", 2)
    made = trainer(way, rank, make=Hidden)
    try:
        made.training_step(next(iter(batches(way, rank, 0, 1))), loss)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
