"""Loops of ranks with different numbers of batches: ``trainer.even``, and the line about an ended rank."""

import os

import pytest
import torch

from hpcrun import DistributedAMPTrainer, MicroBatches, cleanup_distributed, setup_distributed
from tests.on_ranks import agreed, forked, ranks
from tests.ports import free_port
from tests.train.forks import fork_ranks
from tests.train.parallelism import Net, adamw, flat
from tests.train.small_training import loss


def batches(rank, count):
    """Return batches of a rank; the last batch is smaller."""
    generator = torch.Generator().manual_seed(10 + rank)
    found = []
    for index in range(count):
        inputs = torch.randn(3 if index == count - 1 else 8, 6, generator=generator)
        found.append((inputs, inputs.sin().sum(1)))
    return found


def make(**options):
    torch.manual_seed(0)
    made = DistributedAMPTrainer(Net(), adamw, device="cpu", clip_norm=0.5, **options)
    made.wrap_model()
    return made


def reference(counts, *, by_samples):
    """Return the weights of one process that trains on the batches of all ranks."""
    made = make(rank=0, world_size=1)
    given = [batches(rank, count) for rank, count in enumerate(counts)]
    for step in range(max(counts)):
        present = MicroBatches(own[step] for own in given if step < len(own))
        sizes = [len(x) for x, _ in present] if by_samples else None
        made.training_step(present, loss, weights=sizes)
    return flat(made.module), made.steps


@forked
def references(tmp_path):
    """One process without a group."""


@pytest.mark.parametrize("by_samples", [False, True], ids=["ranks", "samples"])
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize("counts", [(5, 3), (3, 5), (0, 2)], ids=str)
@ranks(2)
def test_ranks_with_different_numbers_of_batches_train_as_one_process(
    rank, tmp_path, counts, parallel, by_samples
):
    made = make(parallel=parallel)
    means = []
    for batch in made.even(batches(rank, counts[rank])):
        sizes = [len(batch[0])] if by_samples else None
        result = made.training_step(batch, loss, weights=sizes)
        means.append(made.mean(result))
    assert agreed(made.steps) == max(counts)
    assert agreed(means) == means
    whole = made.whole_module()
    if parallel == "ddp":
        agreed([flat(made.module).tolist(), made.optimizer.state_dict()["state"][0]["step"].item()])
    # An equal step afterwards has equal weights again.
    made.training_step(batches(rank, 1)[0], loss)
