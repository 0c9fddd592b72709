"""The optimizer and the schedule of a config."""

import pytest
import torch
from torch import nn

from hpcrun import scaled_lr
from hpcrun.config import ConfigError
from hpcrun.errors import UserError
from hpcrun.train.learning_rate import learning_rate_lines
from hpcrun.train.optimizer import (
    build_optimizer,
    build_schedule,
    has_fused,
    learning_rate_factor,
    optimizer_of,
)
from hpcrun.train.step.trainer import AMPTrainer
from tests.support.training.small_training import config


@pytest.mark.parametrize(
    ("schedule", "factors"),
    [
        # step:        0    3    4    8 (half way)  12 (the end)
        ("cosine", [0.25, 1.0, 1.0, 0.6, 0.2]),
        ("linear", [0.25, 1.0, 1.0, 0.6, 0.2]),
        ("constant", [0.25, 1.0, 1.0, 1.0, 1.0]),
        ("wsd optim.decay_steps=8", [0.25, 1.0, 1.0, 0.6, 0.2]),
        # A tenth of all steps: the last step.
        ("wsd optim.decay_steps=null", [0.25, 1.0, 1.0, 1.0, 0.2]),
    ],
)
def test_the_schedule_warms_up_and_decays_to_its_final_fraction(schedule, factors):
    keys = ["train.steps=12", "optim.warmup_steps=4", "optim.final_lr_fraction=0.2"]
    factor = learning_rate_factor(config(*keys, *f"optim.schedule={schedule}".split()))
    assert [factor(step) for step in (0, 3, 4, 8, 12)] == pytest.approx(factors)


def test_the_peak_rate_is_scaled_with_the_batch_and_reported():
    keys = ("train.lr=0.01", "train.batch_size=128")
    for rule, peak, words in (
        ("none", 0.01, None),
        ("linear", 0.04, "peak learning rate 0.04: train.lr 0.01 times train.batch_size 128 / "),
        ("sqrt", 0.02, "peak learning rate 0.02: train.lr 0.01 times the square root of train.ba"),
    ):
        base = () if rule == "none" else ("train.lr_base_batch=32",)
        wanted = config(*keys, *base, f"train.lr_scaling={rule}")
        optimizer = build_optimizer(nn.Linear(2, 2), wanted)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(peak)
        build_schedule(optimizer, wanted)
        lines = list(learning_rate_lines(wanted, optimizer))
        assert [line.startswith(words or "") for line in lines] == ([True] if words else [])
    with pytest.raises(ConfigError, match="lr_base_batch: lr_scaling=sqrt needs the batch size"):
        config("train.lr_scaling=sqrt")


def test_a_rate_is_scaled_with_the_number_of_ranks():
    assert [scaled_lr(0.1, 16), scaled_lr(0.1, 16, "sqrt")] == pytest.approx([1.6, 0.4])
    assert scaled_lr(0.1, 16, "none") == scaled_lr(0.1, 1) == 0.1
    for arguments, part in (
        ((0.1, 4, "square"), "use linear, sqrt or none"),
        ((0.1, 0), "a number above 0"),
    ):
        with pytest.raises(ValueError, match=part):
            scaled_lr(*arguments)


class Own:
    """A task with an optimizer."""

    def __init__(self, make):
        self.build_optimizer = make


def test_the_schedule_multiplies_each_groups_own_rate():
    wanted = config("train.lr=0.5", "train.steps=4", "optim.schedule=linear")
    model = nn.Linear(2, 2)
    groups = [{"params": [model.weight], "lr": 0.1}, {"params": [model.bias], "lr": 0.01}]
    optimizer = optimizer_of(Own(lambda _: torch.optim.SGD(groups)), model, wanted)
    schedule = build_schedule(optimizer, wanted)
    for _ in range(4):
        optimizer.step()
        schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.01, 0.001])


def rate_of_its_own(optimizer):
    """Return the optimizer as one that computes its rates itself, such as Adafactor of transformers."""
    for group in optimizer.param_groups:
        group["lr"] = None
    return optimizer


def test_a_tasks_optimizer_must_have_the_trained_parameters():
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    sgd = torch.optim.SGD
    for make, line in (
        (
            lambda model: model.parameters(),
            "returned a generator; return a torch.optim.Optimizer, or",
        ),
        (
            lambda model: torch.optim.LBFGS(model.parameters()),
            "training_step cannot supply the argument of",
        ),
        (lambda model: sgd([model.weight]), "misses bias, which requires a gradient; put it"),
        (
            lambda model: sgd([*model.parameters(), other.bias]),
            "has parameters that are not in the model",
        ),
        (lambda model: [sgd(model.parameters()), 5], "returned a int; return a torch.optim"),
        (
            lambda model: [sgd([model.weight])] * 2,
            "its optimizers cannot be joined: some parameters appear in more than one parameter group;",
        ),
        (
            lambda model: [sgd([("weight", model.weight)]), sgd([model.bias])],
            "its optimizers cannot be joined: all optimizer param groups should be with/without names",
        ),
        (lambda _: [], "returned a list; return a torch.optim.Optimizer, or a list"),
        (
            lambda model: rate_of_its_own(sgd(model.parameters())),
            "gave the learning rate None; give",
        ),
    ):
        with pytest.raises(UserError) as refused:
            optimizer_of(Own(make), model, config())
        where, _, said = str(refused.value).partition("build_optimizer()")
        assert where == "task: Own."
        assert said.lstrip(": ").startswith(line)
    assert type(optimizer_of(Own(lambda _: None), model, config())) is torch.optim.AdamW
    model.bias.requires_grad = False
    optimizer_of(Own(lambda model: sgd([model.weight])), model, config())


class Layers(nn.Module):
    """An embedding, two layers in a list, and an output layer."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.output = nn.Linear(6, 7, bias=False)

    def forward(self, x):
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x).tanh()
        return self.output(x)


def trained(make, *, reload_after=None, tmp_path=None):
    """Return the weights after six steps; at ``reload_after`` a new trainer loads a checkpoint."""

    def trainer():
        torch.manual_seed(0)
        wanted = config("train.steps=6", "optim.schedule=linear")
        return AMPTrainer(
            Layers(), make, device="cpu", ema=0.5, clip_norm=1.0,
            scheduler=lambda optimizer: build_schedule(optimizer, wanted),
        )  # fmt: skip

    made = trainer()
    for step in range(6):
        if step == reload_after:
            assert made.save_checkpoint(tmp_path, step).ok
            made = trainer()
            made.load_checkpoint(tmp_path)
        batch = torch.arange(7).roll(step)
        made.training_step(batch, lambda model, x: model(x).square().mean() - model(x).mean())
    return made


def optimizers(model):
    """One optimizer for each kind of weight."""
    return {
        "embedding": torch.optim.SGD(model.embedding.parameters(), lr=0.1, momentum=0.9),
        "rest": torch.optim.AdamW([*model.layers.parameters(), model.output.weight], lr=0.01),
    }


@pytest.mark.parametrize("reload_after", [None, 0, 3])
def test_several_optimizers_take_the_steps_that_each_takes_alone(tmp_path, reload_after):
    def joint(model):
        return optimizer_of(Own(optimizers), model, config())

    made = trained(joint, reload_after=reload_after, tmp_path=tmp_path)
    torch.manual_seed(0)
    model, wanted = Layers(), config("train.steps=6", "optim.schedule=linear")
    apart = optimizers(model).values()
    schedules = [build_schedule(each, wanted) for each in apart]
    for step in range(6):
        batch = torch.arange(7).roll(step)
        (model(batch).square().mean() - model(batch).mean()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for each in (*apart, *schedules):
            each.step()
        model.zero_grad()
    for mine, other in zip(made.module.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, other)
    assert [group["lr"] for group in made.optimizer.param_groups] == [
        group["lr"] for each in apart for group in each.param_groups
    ]


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd"])
def test_the_fused_kernel_takes_the_same_steps(name):
    weights = []
    for fused in ("true", "false"):
        torch.manual_seed(0)
        model = nn.Linear(6, 5)
        wanted = config(f"optim.name={name}", f"optim.fused={fused}", "train.lr=0.01")
        optimizer = build_optimizer(model, wanted)
        assert bool(optimizer.param_groups[0].get("fused")) is (fused == "true")
        for step in range(5):
            inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
            model(inputs).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        weights.append(model.weight.detach())
    torch.testing.assert_close(*weights)


@pytest.mark.parametrize("fused", ["true", "false"])
def test_sgd_trains_a_weight_whose_first_gradient_comes_late(fused):
    model = nn.ParameterList([torch.ones(2, 2), torch.ones(2, 2)])
    wanted = config(
        *("optim.name=sgd", f"optim.fused={fused}", "optim.momentum=0.5"),
        *("train.lr=0.5", "optim.weight_decay=0"),
    )
    optimizer = build_optimizer(model, wanted)
    for late in (None, torch.ones(2, 2), torch.ones(2, 2)):
        model[0].grad, model[1].grad = torch.ones(2, 2), late
        optimizer.step()
    assert model[1].tolist() == [[1 - 0.5 - 0.75] * 2] * 2


def test_without_a_fused_kernel_the_plain_kernel_is_used():
    # Complex weights, and a device without fused kernels.
    for model in (nn.Linear(2, 2, dtype=torch.complex64), nn.Linear(2, 2, device="meta")):
        assert not has_fused(torch.optim.AdamW, list(model.parameters()))
        optimizer = build_optimizer(model, config("optim.fused=true"))
        assert not optimizer.param_groups[0].get("fused")


def test_another_error_in_the_fused_kernel_s_trial_is_raised(monkeypatch):
    def fail(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")

    monkeypatch.setattr(torch.optim.AdamW, "step", fail)
    with pytest.raises(torch.OutOfMemoryError):
        build_optimizer(nn.Linear(3, 3), config("optim.fused=true"))


@pytest.mark.parametrize(
    ("name", "kind", "expected"),
    [
        ("adamw", torch.optim.AdamW, {"betas": (0.8, 0.99), "eps": 1e-6}),
        ("adam", torch.optim.Adam, {"betas": (0.8, 0.99), "eps": 1e-6}),
        ("sgd", torch.optim.SGD, {"momentum": 0.7}),
    ],
)
def test_the_optimizer_follows_the_config(name, kind, expected):
    optimizer = build_optimizer(
        nn.Linear(2, 2),
        config(
            f"optim.name={name}",
            "optim.betas=[0.8, 0.99]",
            "optim.eps=1e-6",
            "optim.momentum=0.7",
        ),
    )
    assert type(optimizer) is kind
    for group in optimizer.param_groups:
        assert {key: group[key] for key in expected} == expected


def test_matrices_decay_and_vectors_and_frozen_parameters_do_not():
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 1))
    model[2].requires_grad_(False)
    optimizer = build_optimizer(model, config("optim.weight_decay=0.3"))
    decay = {
        id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]
    }
    named = {name: decay.get(id(p)) for name, p in model.named_parameters()}
    assert named == {
        "0.weight": 0.3,
        "0.bias": 0.0,
        "1.weight": 0.0,
        "1.bias": 0.0,
        "2.weight": None,
        "2.bias": None,
    }
