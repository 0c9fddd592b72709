"""A model of many initializers, and the comparison of a deferred build with a normal build."""

import random
from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from hpcrun.ranks.collective import Ranks
from hpcrun.train.model.deferred import build_deferred


class Varied(nn.Module):
    """A model with the ways of initialization that models use, and some that are hard to defer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.look = nn.Sequential(nn.Conv1d(1, 2, 3), nn.BatchNorm1d(2), nn.Flatten())
        self.head = nn.Linear(12, 8)
        nn.init.orthogonal_(self.head.weight)
        self.tokens = nn.Embedding(10, 8, padding_idx=0)
        self.tied = nn.Linear(8, 10, bias=False)
        self.tied.weight = self.tokens.weight
        self.place = nn.Parameter(torch.zeros(5, 8))
        nn.init.trunc_normal_(self.place, std=0.02)
        self.large = nn.Parameter(torch.zeros(400, 400))
        self.large.data.normal_().mul_(0.5)
        turns = 1 / (10000 ** (torch.arange(0, 8, 2) / 8))
        self.register_buffer("turn", torch.outer(torch.arange(9.0), turns), persistent=False)
        self.register_buffer("features", torch.randn(3, 3))
        self.table = [torch.arange(5) * 2]
        with torch.random.fork_rng():
            torch.manual_seed(9)
            self.forked = nn.Linear(3, 3)
        self.first = nn.Linear(3, 3)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.numbers = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.drawn = nn.Parameter(torch.from_numpy(np.random.rand(4).astype("float32")))
        self.pair = nn.Parameter(torch.full((2,), random.random()))
        for parameter in self.encoder.parameters():
            parameter.data.mul_(1.5)
        self.load_state_dict({"first.bias": torch.arange(3.0)}, strict=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        x = self.encoder(x.unsqueeze(1)).squeeze(1)
        x = self.head(self.look(x.unsqueeze(1))) + self.place.sum(0) + self.large.sum()
        spread = self.first(x[:, :3]) + self.forked(x[:, :3])
        rest = (self.numbers.sum() + self.drawn.sum() + self.pair.sum()) ** 2
        return self.tied(x) + spread.sum() + rest + self.normed(x[:, :4]).sum()


class Coarse(Varied):
    """With another default type for a while; FSDP does not take parameters of two types."""

    def __init__(self) -> None:
        super().__init__()
        torch.set_default_dtype(torch.bfloat16)
        self.coarse = nn.Parameter(torch.randn(300, 300))
        torch.set_default_dtype(torch.float32)


def seed() -> None:
    random.seed(4)
    np.random.seed(4)
    torch.manual_seed(4)


def require_same(make: Callable[[], nn.Module]) -> None:
    """Compare the parts of a deferred build with a normal build, on rank 0 and on another rank."""

    def seeded() -> nn.Module:
        seed()
        return make()

    normal = seeded()
    expected = dict(normal.named_parameters())
    _, first, reason = build_deferred(seeded, Ranks())
    assert first is not None, reason
    _, other, reason = build_deferred(seeded, Ranks(rank=1))
    assert other is not None, reason
    assert other.weights == {}
    assert first.signature() == other.signature()
    assert first.weights.keys() == expected.keys()
    for deferred in (first, other):
        for name, value in deferred.model.named_parameters():
            assert value.is_meta
            assert value.shape == expected[name].shape
            assert value.stride() == expected[name].stride()
            assert value.requires_grad == expected[name].requires_grad
    for name, value in expected.items():
        assert torch.equal(value, first.weights[name]), name
    for name, buffer in normal.named_buffers():
        assert torch.equal(buffer, dict(first.model.named_buffers())[name]), name
    first.restore()
    for name, value in first.model.named_parameters():
        assert torch.equal(value, expected[name])
