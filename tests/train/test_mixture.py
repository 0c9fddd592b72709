"""Several datasets in one order: exact shares, whole passes, the same samples for any number of ranks."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset

from hpcrun import Mixture, UserError, training_steps
from hpcrun.train.data.batching import BLOCK, block_counts


class Tens(Dataset):
    """A dataset in which sample i of dataset d is 1000 d + i."""

    def __init__(self, number, size):
        self.number, self.size = number, size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        assert 0 <= index < self.size
        return torch.tensor(1000 * self.number + index)


def mixture():
    return Mixture([Tens(0, 30), Tens(1, 100), Tens(2, 7)], [2, 1, 1])


def positions(first, count):
    return np.arange(first, first + count, dtype=np.int64)


def samples(world_size, first, last, *, workers=0, accumulation=1):
    """Return the samples of each step, joined in the order of micro-batches and ranks."""
    ranks = [
        training_steps(
            mixture(),
            range(first, last),
            rank=rank,
            world_size=world_size,
            batch_size=12,
            accumulation=accumulation,
            seed=5,
            workers=workers,
            pin_memory=False,
        )
        for rank in range(world_size)
    ]
    found = []
    for step in zip(*ranks, strict=True):
        found.append([int(v) for micro in zip(*step, strict=True) for part in micro for v in part])
    return found


def test_any_number_of_ranks_takes_the_same_samples():
    whole = samples(1, 0, 9)
    assert samples(3, 0, 9, accumulation=2) == whole
    # Resumed on other numbers of ranks and loader processes.
    assert samples(2, 4, 9) == samples(4, 4, 9) == samples(1, 4, 9, workers=2) == whole[4:]


def test_every_block_has_exactly_the_shares():
    mixed = mixture()
    found = mixed.sample_order(positions(0, 2 * BLOCK), seed=3)
    for block in (found[:BLOCK], found[BLOCK:]):
        first = np.count_nonzero(block < 30)
        second = np.count_nonzero((block >= 30) & (block < 130))
        assert [first, second, BLOCK - first - second] == [BLOCK // 2, BLOCK // 4, BLOCK // 4]
    seen = np.bincount(found, minlength=len(mixed))
    for own, count in zip((seen[:30], seen[30:130], seen[130:]), (2048, 1024, 1024), strict=True):
        whole, more = divmod(2 * count, len(own))
        assert sorted(own.tolist()) == [whole] * (len(own) - more) + [whole + 1] * more
    assert mixed.shares() == [0.5, 0.25, 0.25]


@given(weights=st.lists(st.floats(0.01, 10), min_size=1, max_size=6))
def test_the_share_of_a_dataset_is_its_weight(weights):
    for count, weight in zip(block_counts(weights), weights, strict=True):
        assert abs(count - weight * BLOCK / sum(weights)) < 1


def test_the_order_of_a_mixture_does_not_change_between_versions():
    # A change here changes the samples of every run that resumes after an update.
    assert mixture().sample_order(positions(BLOCK - 4, 8), seed=5).tolist() == GOLDEN


GOLDEN = [135, 134, 27, 18, 7, 8, 127, 0]


@pytest.mark.parametrize(
    ("sizes", "weights", "line"),
    [
        ([3, 0], [1, 1], "dataset 1 of the mixture has no samples"),
        ([3, 3], [1], "1 weights for 2 datasets"),
        ([3, 3], [1, -1], "must be positive"),
        ([3, 3], [1, 1e-6], "the weight 1e-06 is less than 1/4096"),
    ],
)
def test_a_mixture_that_cannot_be_is_refused_in_one_line(sizes, weights, line):
    with pytest.raises(UserError, match=line):
        Mixture([Tens(number, size) for number, size in enumerate(sizes)], weights)
