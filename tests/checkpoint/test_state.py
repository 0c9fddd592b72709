"""The captured state is complete, and is restored bit for bit."""

import io
import random

import numpy as np
import pytest
import torch
from torch import nn

from hpcrun.checkpoint.state.capture import apply_shared, capture_shared
from hpcrun.checkpoint.state.generators import capture_generators, restore_generators
from hpcrun.storage.errors import CheckpointError

OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.1),
    "adam amsgrad": lambda parameters: torch.optim.Adam(parameters, lr=0.05, amsgrad=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, weight_decay=0.1),
    "sgd momentum": lambda parameters: torch.optim.SGD(
        parameters, lr=0.05, momentum=0.9, weight_decay=0.1
    ),
}


class Net(nn.Module):
    """A model with tied weights, a buffer, dropout, a frozen and an unused part, named like DDP's prefix."""

    def __init__(self, width=8):
        super().__init__()
        self.first = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.last = nn.Linear(width, width, bias=False)
        self.last.weight = self.first.weight
        self.module = nn.Linear(2, 2)
        self.frozen = nn.Parameter(torch.ones(width), requires_grad=False)

    def forward(self, x):
        x = nn.functional.dropout(self.norm(self.first(x)).relu(), 0.3, self.training)
        return self.last(x) * self.frozen


class Training:
    """Return a model, its optimizer in two groups, a scaler and a scheduler."""

    def __init__(self, optimizer="adamw", seed=0, width=8):
        torch.manual_seed(seed)
        self.model = Net(width)
        decayed = [p for p in self.model.parameters() if p.dim() > 1]
        others = [p for p in self.model.parameters() if p.dim() <= 1]
        self.optimizer = OPTIMIZERS[optimizer](
            [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
        )
        self.scaler = torch.amp.GradScaler("cpu", growth_interval=2)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda k: 1 / (k + 1))

    def train(self, steps):
        for _ in range(steps):
            # Each of these keeps a second number for the next call.
            x = torch.randn(4, 8) + random.gauss(0, 1) + np.random.standard_normal()
            self.scaler.scale(self.model(x).square().mean()).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
            self.scheduler.step()

    def capture(self, **extra):
        parts = {"scaler": self.scaler, "scheduler": self.scheduler}
        return capture_shared(self.model, self.optimizer, **parts, extra=extra)

    def apply(self, shared):
        parts = {"scaler": self.scaler, "scheduler": self.scheduler}
        return apply_shared(shared, self.model, self.optimizer, **parts)


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def require_equal(left, right, where=""):
    assert type(left) is type(right), where
    if isinstance(left, dict):
        assert left.keys() == right.keys(), where
        for key in left:
            require_equal(left[key], right[key], f"{where}.{key}")
    elif isinstance(left, list | tuple):
        require_equal(dict(enumerate(left)), dict(enumerate(right)), where)
    elif isinstance(left, torch.Tensor):
        assert torch.equal(left, right), where
    else:
        assert left == right, where


@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_resumed_run_ends_with_the_undisturbed_bits(optimizer, steps):
    undisturbed = Training(optimizer)
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    undisturbed.train(steps)
    shared, own = through_a_file((undisturbed.capture(step=steps), capture_generators()))
    undisturbed.train(4)

    resumed = Training(optimizer, seed=99)
    resumed.train(2)
    assert resumed.apply(shared) == {"step": steps}
    assert restore_generators(own) == []
    resumed.train(4)
    require_equal(resumed.capture(), undisturbed.capture())
    assert resumed.scaler.get_scale() > 2.0**16


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_save_before_the_first_step_does_not_change_training(optimizer):
    saved, not_saved = Training(optimizer), Training(optimizer)
    saved.capture()
    for training in (saved, not_saved):
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        training.train(3)
    require_equal(saved.capture(), not_saved.capture())


def test_names_are_canonical_whether_compiled_or_not():
    training = Training()
    plain = capture_shared(training.model, training.optimizer, extra={})
    training.model = torch.compile(training.model, backend="eager")
    training.train(1)
    compiled = capture_shared(training.model, training.optimizer, extra={})
    assert plain["model"].keys() == compiled["model"].keys() == Net().state_dict().keys()
    scattered = capture_shared(nn.DataParallel(training.model), training.optimizer, extra={})
    require_equal(scattered, compiled)
    names = set(compiled["optimizer"]["state"])
    assert names == {"first.weight", "first.bias", "norm.weight", "norm.bias"}
    again = Training(seed=5)
    apply_shared(compiled, again.model, again.optimizer)
    apply_shared(compiled, training.model, training.optimizer)
    require_equal(capture_shared(again.model, again.optimizer, extra={}), compiled)


@pytest.mark.parametrize("steps", [0, 3])
def test_the_choice_of_kernel_is_not_restored(steps):
    saved, resumed = Training("adamw"), Training("adamw", seed=5)
    for group in saved.optimizer.param_groups:
        group |= {"fused": True, "foreach": False}
    saved.train(steps)
    resumed.apply(saved.capture())
    assert {group["fused"] for group in resumed.optimizer.param_groups} == {None}
    resumed.train(1)


def test_a_checkpoint_of_another_model_names_what_differs():
    shared = Training().capture()
    with pytest.raises(
        CheckpointError, match=r"frozen has shape \(8,\) in the checkpoint, but \(6,\)"
    ):
        Training(width=6).apply(shared)
    shared["model"] |= {"more": torch.ones(1), "extra": torch.ones(1)}
    with pytest.raises(
        CheckpointError, match=r"extra is in the checkpoint, but not .* \(and 1 more\)"
    ):
        Training().apply(shared)


def test_exact_numbers_of_numpy_become_plain_numbers():
    training = Training()
    training.optimizer.param_groups[0]["lr"] = np.float64(0.1)
    extra = {"best": [np.float64(1e-3), (np.int64(3),)], "ended": np.bool_(True)}
    shared = capture_shared(training.model, training.optimizer, extra=extra)
    kinds = [type(one) for one in (*shared["extra"]["best"], *shared["extra"]["best"][1])]
    assert kinds == [float, tuple, int]
    assert shared["extra"] == {"best": [1e-3, (3,)], "ended": True}
    assert type(shared["optimizer"]["param_groups"][0]["lr"]) is float
    assert type(training.optimizer.param_groups[0]["lr"]) is np.float64
