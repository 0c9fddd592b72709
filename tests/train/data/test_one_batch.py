"""One positional batch of ``training_step`` is one batch, of any type; ``MicroBatches`` are several."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from hpcrun import AMPTrainer, MicroBatches, training_steps
from tests.support.training.small_training import Pairs


def linear():
    torch.manual_seed(0)
    return nn.Linear(4, 1)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def trainer(model=None, **options):
    return AMPTrainer(model or linear(), sgd, device="cpu", **options)


def squares(model, x, y):
    return (model(x).squeeze(-1) - y).square().mean()


def flat(model):
    return torch.cat([value.detach().flatten() for value in model.parameters()])


def test_a_plain_data_loader_trains_a_linear_regression():
    torch.manual_seed(1)
    x = torch.randn(512, 4)
    loader = DataLoader(TensorDataset(x, x @ torch.arange(4.0) + 0.5), batch_size=32, shuffle=True)
    made = trainer()
    for _ in range(30):
        for batch in loader:
            assert type(batch) is list
            made.training_step(batch, lambda model, pair: squares(model, *pair))
    wanted = torch.tensor([0.0, 1.0, 2.0, 3.0, 0.5])
    assert (flat(made.module) - wanted).abs().max() < 1e-5


@dataclass
class Pair:
    x: Tensor
    y: Tensor


X, Y = torch.arange(32.0).reshape(8, 4) / 10, torch.arange(8.0)


@pytest.mark.parametrize(
    ("batch", "parts"),
    [
        ([X, Y], lambda batch: batch),
        ((X, Y), lambda batch: batch),
        ({"x": X, "y": Y}, lambda batch: batch.values()),
        (Pair(X, Y), lambda batch: (batch.x, batch.y)),
        (torch.cat([X, Y[:, None]], 1), lambda batch: (batch[:, :4], batch[:, 4])),
        (MicroBatches([[X, Y]]), lambda batch: batch),
    ],
    ids=["list", "tuple", "dict", "object", "tensor", "micro-batches"],
)
def test_a_batch_of_any_type_is_one_batch(batch, parts):
    made, twin, seen = trainer(), linear(), []

    def loss(model, given):
        seen.append(type(given))
        return squares(model, *parts(given))

    made.training_step(batch, loss)
    squares(twin, X, Y).backward()
    sgd(twin).step()
    assert torch.equal(flat(made.module), flat(twin))
    assert seen == [list if isinstance(batch, MicroBatches) else type(batch)]


def test_equal_micro_batches_make_the_step_of_one():
    one, two, weighted = trainer(), trainer(), trainer()

    def loss(model, pair):
        return squares(model, *pair)

    one.training_step([X, Y], loss)
    two.training_step(MicroBatches([[X, Y], [X, Y]]), loss)
    weighted.training_step(MicroBatches([[X, Y], [X, Y * 9]]), loss, weights=[3, 0])
    assert torch.equal(flat(one.module), flat(two.module))
    assert torch.equal(flat(one.module), flat(weighted.module))


def test_training_steps_give_micro_batches():
    steps = training_steps(
        Pairs(8), range(1), rank=0, world_size=1, batch_size=8, accumulation=2, seed=0, workers=0,
        pin_memory=False,
    )  # fmt: skip
    (step,) = steps
    assert type(step) is MicroBatches
    assert [len(x) for x, _ in step] == [4, 4]
