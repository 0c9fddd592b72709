"""Micro-batches of different weight: their weighted mean equals the mean of the whole batch."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hpcrun.train.data.micro_batches import MicroBatches
from hpcrun.train.step.trainer import AMPTrainer


def net():
    torch.manual_seed(0)
    return nn.Linear(4, 8)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.5)


def loss(model, batch):
    """Return the mean over the tokens that are not masked: NaN if all are masked."""
    tokens, targets = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), ignore_index=-1)


def batch(masked):
    """Return rows of five tokens, ``masked[i]`` of row i without a target."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randn(len(masked), 5, 4, generator=generator)
    targets = torch.randint(8, (len(masked), 5), generator=generator)
    for row, count in enumerate(masked):
        targets[row, :count] = -1
    return tokens, targets


def rows(data, chosen):
    return [tuple(part[first:last] for part in data) for first, last in chosen]


@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_micro_batches_weighted_by_tokens_equal_the_whole_batch(kind):
    # The second micro-batch has no token with a target.
    data = batch([0, 4, 5, 5, 1])
    parts = rows(data, [(0, 2), (2, 4), (4, 5)])
    whole, split, alike = net(), net(), net()
    one = AMPTrainer(whole, sgd, device="cpu").training_step(data, loss)
    counts = [kind(int((targets >= 0).sum())) for _, targets in parts]
    three = AMPTrainer(split, sgd, device="cpu").training_step(MicroBatches(parts), loss, counts)
    torch.testing.assert_close(split.weight, whole.weight)
    torch.testing.assert_close(three.loss, one.loss)
    AMPTrainer(alike, sgd, device="cpu").training_step(MicroBatches([parts[0], parts[2]]), loss)
    assert not torch.allclose(alike.weight, whole.weight)


def test_a_step_without_a_token_changes_nothing():
    module = net()
    before = module.weight.clone()
    result = AMPTrainer(module, sgd, device="cpu").training_step(
        batch([5, 5]), loss, [torch.tensor(0)]
    )
    assert torch.equal(module.weight, before)
    assert result.loss.item() == 0.0


@pytest.mark.parametrize(
    ("weight", "total", "told"),
    [
        (torch.ones(5), None, r"micro-batch 0 has the shape \[5\]; give a scalar"),
        (-1.0, None, "micro-batch 0 is -1, which is not 0 or more"),
        (2, 0, "total=0 is not the sum of the weights over all ranks"),
    ],
)
def test_an_invalid_weight_is_refused(weight, total, told):
    with pytest.raises(ValueError, match=told):
        AMPTrainer(net(), sgd, device="cpu").training_step(batch([0]), loss, [weight], total)
