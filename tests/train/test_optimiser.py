"""The optimiser and the schedule that a config asks for."""

import pytest
import torch
from torch import nn

from hpcrun.config import override_layer, resolve
from hpcrun.train.optimiser import build_optimizer, build_schedule, learning_rate_factor


def config(*overrides):
    return resolve([override_layer(overrides)])


@pytest.mark.parametrize(
    ("schedule", "factors"),
    [
        # step:        0    3    4    8 (half way)  12 (the end)
        ("cosine", [0.25, 1.0, 1.0, 0.6, 0.2]),
        ("linear", [0.25, 1.0, 1.0, 0.6, 0.2]),
        ("constant", [0.25, 1.0, 1.0, 1.0, 1.0]),
    ],
)
def test_the_schedule_warms_up_and_comes_down_to_its_final_fraction(schedule, factors):
    factor = learning_rate_factor(
        config(
            "train.steps=12",
            "optim.warmup_steps=4",
            "optim.final_lr_fraction=0.2",
            f"optim.schedule={schedule}",
        )
    )
    assert [factor(step) for step in (0, 3, 4, 8, 12)] == pytest.approx(factors)


def test_cosine_and_linear_differ_between_their_ends():
    factors = [
        learning_rate_factor(
            config("train.steps=8", "optim.final_lr_fraction=0", f"optim.schedule={schedule}")
        )(2)
        for schedule in ("cosine", "linear")
    ]
    assert factors == pytest.approx([0.5 + 0.5**1.5, 0.75])


def test_a_training_that_is_all_warm_up_ends_at_the_peak():
    factor = learning_rate_factor(config("train.steps=5", "optim.warmup_steps=5"))
    assert [factor(step) for step in range(6)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])


def test_the_first_step_is_taken_at_the_first_value_of_the_schedule():
    wanted = config("train.lr=0.5", "optim.warmup_steps=10")
    optimizer = build_optimizer(nn.Linear(2, 2), wanted)
    build_schedule(optimizer, wanted)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("name", "kind", "expected"),
    [
        ("adamw", torch.optim.AdamW, {"betas": (0.8, 0.99), "eps": 1e-6}),
        ("adam", torch.optim.Adam, {"betas": (0.8, 0.99), "eps": 1e-6}),
        ("sgd", torch.optim.SGD, {"momentum": 0.7}),
    ],
)
def test_the_optimiser_is_the_one_asked_for_with_its_options(name, kind, expected):
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
