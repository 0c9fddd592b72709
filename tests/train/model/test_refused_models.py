"""A model or a loss that cannot be trained is refused in one line before any computation."""

import copy

import pytest
import torch
from torch import nn

from hpcrun import Task
from hpcrun.config import resolve
from hpcrun.errors import NotTrainable, UserError
from hpcrun.train.data.batching import Batching
from hpcrun.train.model.checks import require_model, unshardable
from hpcrun.train.parallel.choose import Need, decide
from hpcrun.train.step.micro_batches import MicroBatchStep
from hpcrun.train.step.trainer import DistributedAMPTrainer


class Given(Task):
    """A task that returns its constructor arguments."""

    def __init__(self, model=None, loss=None):
        self.model, self.given = model, loss

    def build_model(self):
        return self.model

    def train_dataset(self):
        raise NotImplementedError

    def loss(self, model, batch):
        return self.given(model(batch))


class Scalar(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.scale = nn.Linear(3, 1), nn.Parameter(torch.tensor(1.0))


def refusal(model):
    with pytest.raises(UserError) as refused:
        require_model(model, Given())
    assert "\n" not in str(refused.value)
    return str(refused.value)


def frozen():
    return nn.Linear(2, 2).requires_grad_(False)


@pytest.mark.parametrize(
    ("model", "line"),
    [
        (None, "Given.build_model() returned None; return a torch.nn.Module"),
        (nn.Linear, "Given.build_model() returned the class Linear; return"),
        ([], "Given.build_model() returned a list; return"),
        (nn.LazyLinear(3), "has no shape before its first batch (weight, bias); give the sizes"),
        (nn.Sequential(nn.Linear(2, 2), nn.LazyBatchNorm1d()), "batch (1.weight, 1.bias, 1.runn"),
        (frozen(), "the model has nothing to train: requires_grad is False for weight, bias"),
        (nn.Flatten(), "the model has nothing to train: it has no parameters"),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused(model, line):
    assert line in refusal(model)


def test_sparse_gradients_are_refused():
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 1))
    assert "the gradients of 0.weight are sparse, " in refusal(model)


def test_auto_does_not_shard_a_model_that_torch_cannot_shard():
    why, remedy = unshardable(Scalar())
    assert (why, remedy) == ("scale has no dimensions", "give it the shape (1,)")
    assert unshardable(nn.Linear(2, 2, dtype=torch.complex64))[0] == "weight is complex"
    assert unshardable(nn.Embedding(2, 2, sparse=True))[0] == "weight has sparse gradients"
    assert unshardable(nn.Linear(2, 2))[0] is None
    config, large = resolve([]), Need(1000, 1000, 2000)
    chosen, line = decide(config, large, 1000, unfit=why)
    assert chosen == "ddp"
    assert line.startswith(
        "train.parallel=auto chooses ddp, because scale has no dimensions: 1.0 kB"
    )
    assert decide(config, large, 1000, earlier="fsdp")[0] == "fsdp"


def sgd(model):
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


def taking(task, optimizer=sgd):
    trainer = DistributedAMPTrainer(task.model, optimizer, device="cpu")
    return MicroBatchStep(trainer, task, Batching(4, 1, 1))


@pytest.mark.parametrize(
    ("loss", "line"),
    [
        (lambda _: None, "returned None; return one floating-point number, a tensor without"),
        (lambda y: (y.mean(), {}), "returned a tuple; return"),
        (lambda y: {"loss": y.mean()}, "returned a dict; return"),
        (lambda y: y.mean().item(), "returned a float; return"),
        (lambda y: y.square(), "returned a tensor of shape (4, 1) in float32; return"),
        (lambda y: y.mean().reshape(1), "returned a tensor of shape (1,) in float32; return"),
        (lambda _: torch.tensor(3), "returned a tensor without dimensions in int64; return"),
        (
            lambda y: y.mean().detach(),
            "returned a number that depends on no trained weight; return",
        ),
    ],
)
def test_a_loss_without_gradient_is_refused_at_once(loss, line):
    with pytest.raises(NotTrainable, match=r"^Given\.loss\(\) returned ") as refused:
        taking(Given(nn.Linear(3, 1), loss))(0, [torch.ones(4, 3)])
    assert str(refused.value).startswith(f"Given.loss() {line}")


def test_unfreezing_during_training_is_refused_and_freezing_is_not():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    begins = 2

    def thaw(module, _):
        module.requires_grad_(True)

    def held(module, _):
        module.requires_grad_(module.step >= begins)

    model[0].step = 0
    model[0].register_forward_pre_hook(held)
    take = taking(Given(model, torch.Tensor.mean))
    before = model[0].weight.detach().clone()
    for step in range(4):
        assert torch.equal(model[0].weight, before) is (step <= begins)
        model[0].step = step
        take(step, [torch.ones(4, 3)])
    late = nn.Sequential(nn.Linear(3, 3).requires_grad_(False), nn.Linear(3, 1))
    late[0].register_forward_pre_hook(thaw)
    by_all = taking(
        Given(copy.deepcopy(late), torch.Tensor.mean),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    )
    by_all(7, [torch.ones(4, 3)])
    with pytest.raises(
        UserError, match=r"^requires_grad became True in step 7 for 0.weight, 0.bias,"
    ):
        taking(Given(late, torch.Tensor.mean))(7, [torch.ones(4, 3)])
