"""Ranks that omit parts of a model: named before a rank waits, or trained if the mode allows it."""

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hpcrun.errors import UserError
from tests.support.on_ranks import ranks
from tests.support.training.parallelism import Net, Way, batches, flat, trainer
from tests.support.training.small_training import loss


def refusal(rank, ask):
    """Return the message of a UserError, which every rank must raise and only rank 0 prints."""
    with pytest.raises(UserError) as raised:
        ask()
    assert raised.type.__name__ == ("ErrorOnAllRanks" if rank == 0 else "PrintedByRankZero")
    return str(raised.value)


class HalfUsed(Net):
    """A model with two layers that its output does not use: one never, one only on rank 1."""

    def __init__(self, dropout=0.0, *, idle_on=()):
        super().__init__(dropout)
        self.spare = nn.Linear(13, 13)
        self.idle = dist.get_rank() in idle_on

    def forward(self, x):
        x, spare = super().forward(x), self.spare(x.new_ones(13)).mean()
        return x if self.idle else x + spare


@pytest.mark.parametrize("idle_on", [(0, 1), (1,)])
@ranks(2)
def test_unused_parameters_are_named_before_a_rank_waits(rank, idle_on):
    way = Way("ddp", 2)
    made = trainer(way, rank, make=lambda dropout: HalfUsed(dropout, idle_on=idle_on))
    said = refusal(rank, lambda: made.training_step(batches(way, rank, 0, 1)[0], loss))
    line = "train.find_unused_parameters: the loss does not depend on spare.weight, spare.bias, and"
    assert re.match((r"rank 1 \(.*\): " if idle_on == (1,) else "") + re.escape(line), said), said


class Choosy(Net):
    """A model: its used parts depend on the pass and the rank: ``choose(pass, rank)`` names unused parts."""

    def __init__(self, choose):
        super().__init__()
        self.spare, self.choose = nn.Linear(13, 13), choose

    def forward(self, x):
        left_out = self.choose(int(self.passes), dist.get_rank())
        self.passes += 1
        x = self.enter(x)
        x = x.detach() if left_out == "what is given" else x
        skips = {"first block": self.blocks[1:], "last block": self.blocks[:-1]}
        for block in skips.get(left_out, self.blocks):
            before, x = x, block(x)
        x = before if left_out == "its result" else x
        return self.leave(x if left_out == "parameters" else x + self.spare(x))


def loss_of_nothing(model, batch):
    loss(model, batch)
    return torch.zeros((), requires_grad=True)


def train(rank, way, choose, *, unused, of=loss):
    """Return the weights after five steps; None except on rank 0."""
    made = trainer(way, rank, make=lambda _: Choosy(choose), unused=unused)
    for step in batches(way, rank, 0, 5):
        made.training_step(step, of)
    whole = made.whole_module()
    return None if whole is None else flat(whole)


BEGINNING = (
    "train.parallel: under fsdp the ranks gather weights and reduce gradients together, but "
)


@pytest.mark.parametrize(
    ("what", "line", "named"),
    [
        (
            "parameters",
            f"{BEGINNING}the loss of rank 1 ",
            "does not depend on spare.weight, spare.bias, ",
        ),
        (
            "its result",
            f"{BEGINNING}the loss of rank 1 ",
            "does not depend on blocks.1, ",
        ),
        (
            "last block",
            f"{BEGINNING}rank 0 reaches blocks.1 while rank 1 ",
            "reaches the end of its forward pass; ",
        ),
        (
            "what is given",
            f"{BEGINNING}the loss of rank 1 ",
            "does not depend on the inputs of blocks.0, ",
        ),
        (
            "any of it",
            f"{BEGINNING}the loss of rank 1 ",
            "does not depend on the model, ",
        ),
    ],
)
@ranks(2)
def test_a_rank_that_skips_a_sharded_part_is_named(rank, what, line, named):
    way = Way("fsdp", 2, accumulation=2)
    of = loss_of_nothing if (what, rank) == ("any of it", 1) else loss

    def left_out(_pass, rank):
        return what if rank == 1 else None

    said = refusal(rank, lambda: train(rank, way, left_out, unused=False, of=of))
    assert said.startswith(line)
    assert named in said


@pytest.mark.parametrize("compiled", [False, True])
@ranks(2)
def test_ranks_that_skip_different_blocks_of_one_size_are_named(rank, compiled):
    """Without the comparison nothing hangs: each rank gets the sum of two blocks' gradients."""

    def left_out(number, rank):
        return ("first block", "last block")[rank] if number else None

    way = Way("fsdp", 2, accumulation=2, compiled=compiled)
    said = refusal(rank, lambda: train(rank, way, left_out, unused=False))
    assert said.startswith(f"{BEGINNING}rank 0 reaches blocks.1 while rank 1 "), said


def all_ranks(number, _rank):
    return "parameters" if number % 2 else None


@pytest.mark.parametrize(
    ("accumulation", "options"),
    [
        (1, {"recompute": "full"}),
        (1, {"reshard": False}),
        # A step of two passes: some parameters get a gradient only in the first pass.
        (2, {}),
    ],
)
@ranks(2)
def test_passes_without_gradient_on_all_ranks_train_the_same_sharded(rank, accumulation, options):
    copies = train(rank, Way("ddp", 2, accumulation=accumulation), all_ranks, unused=True)
    way = Way("fsdp", 2, accumulation=accumulation, **options)
    sharded = train(rank, way, all_ranks, unused=False)
    if rank == 0:
        torch.testing.assert_close(sharded, copies, rtol=0.0, atol=5e-6)
