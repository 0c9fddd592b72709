"""Properties of every language model: shape, causality, and random draws that a seed determines."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from examples.bdh import BDH, BDHShape
from hpcrun.tasks.llama import Llama
from hpcrun.tasks.options import LanguageModelShape

CONTEXT = 12
SHAPES = {
    "llama": LanguageModelShape(layers=2, heads=2, width=32, context=CONTEXT),
    "bdh": BDHShape(layers=2, heads=2, width=16, context=CONTEXT, neurons=64),
}
KINDS: dict[str, type[Llama] | type[BDH]] = {"llama": Llama, "bdh": BDH}

Build = Callable[..., nn.Module]


@pytest.fixture(params=["llama", "bdh"])
def build(request: pytest.FixtureRequest) -> Build:
    kind = request.param

    def built(seed: int = 0, **other: object) -> nn.Module:
        return KINDS[kind](SHAPES[kind].model_copy(update=other), seed=seed)

    return built


def tokens(count: int = 3, length: int = CONTEXT) -> torch.Tensor:
    return torch.randint(0, 256, (count, length), generator=torch.Generator().manual_seed(1))


def test_logits_have_a_row_per_position(build: Build):
    assert build()(tokens()).shape == (3, CONTEXT, 256)


def test_a_later_byte_never_changes_an_earlier_prediction(build: Build):
    model, seen = build().eval(), tokens()
    other = seen.clone()
    other[:, 7] = (other[:, 7] + 1) % 256
    before, after = model(seen), model(other)
    torch.testing.assert_close(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7:], after[:, 7:])


def test_equal_seeds_give_equal_weights_after_any_draws(build: Build):
    torch.manual_seed(1)
    first = build(seed=5).state_dict()
    torch.rand(7)
    second, other = build(seed=5).state_dict(), build(seed=6).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    drawn = [name for name in first if "norm" not in name]
    assert not any(torch.equal(first[name], other[name]) for name in drawn)


def test_dropout_draws_from_the_global_generator_in_training(build: Build):
    model, seen = build(dropout=0.5), tokens()
    torch.manual_seed(0)
    first, second = model(seen), model(seen)
    torch.manual_seed(0)
    assert torch.equal(model(seen), first)
    assert not torch.equal(first, second)
    model.eval()
    assert torch.equal(model(seen), model(seen))
