"""Draws depend on seed, name and index only, and have the distribution that they should have."""

import pytest
import torch
from scipy import stats

from hpcrun.train.model.counter_draws import draw_normal


def drawn(*shape, std=1.0, seed=0, name="weight"):
    weight = torch.empty(shape)
    draw_normal(weight, std, seed=seed, name=name)
    return weight


def test_values_are_normal_and_independent():
    values = drawn(200_001, std=0.02)
    assert stats.kstest(values.numpy() / 0.02, "norm").pvalue > 0.001
    neighbors = torch.corrcoef(torch.stack([values[:-1], values[1:]]))[0, 1]
    assert abs(neighbors.item()) < 0.01
    others = torch.corrcoef(torch.stack([values, drawn(200_001, name="other")]))[0, 1]
    assert abs(others.item()) < 0.01


@pytest.mark.parametrize("other", [{"seed": 1}, {"name": "bias"}])
def test_another_seed_or_name_gives_other_values(other):
    assert torch.equal(drawn(7, 5), drawn(7, 5))
    assert not torch.equal(drawn(7, 5), drawn(7, 5, **other))


def test_a_value_depends_on_its_index_not_on_the_size():
    assert torch.equal(drawn(2**20 + 37)[-50:], drawn(2**20 + 100)[: 2**20 + 37][-50:])
