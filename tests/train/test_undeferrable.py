"""A model whose build needs values of weights is built in full on every rank."""

import re

import pytest
import torch
from torch import nn

from hpcrun.ranks.collective import Ranks
from hpcrun.train.model.deferred import build_deferred
from tests.train.deferring import OWN, seed


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.norm = self.layer.weight.norm().item()


class ReadsInSilence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        try:
            self.values = self.layer.weight.detach().numpy()
        except Exception:
            self.values = None


class OnMeta(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3, device="meta")


class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5))
        self.weight.register_hook(lambda gradient: 2 * gradient)


KEPT: list[torch.Tensor] = []


class Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        KEPT.append(self.layer.weight.detach().clone())


class KeepsARandomTensor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        KEPT.append(torch.randn(3) * 2)


class ReadsARandomTensor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.rate = torch.rand(2).tolist()


class DrawsWithAGenerator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        nn.init.normal_(self.layer.weight, generator=OWN)


class Aliased(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.values = self.layer.weight.data


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (
            Reads,
            r"it reads the values of a tensor \(aten._local_scalar_dense.*\) at .*test_undeferrable.py:",
        ),
        (ReadsInSilence, r"it reads the values of a tensor \(numpy\)"),
        (ReadsARandomTensor, r"it reads the values of a tensor \(tolist\)"),
        (OnMeta, "device meta"),
        (Hooked, "weight has a hook"),
        (Keeps, "held outside parameters, buffers and attributes"),
        (KeepsARandomTensor, "held outside parameters, buffers and attributes"),
        (DrawsWithAGenerator, "a generator that has drawn parameters is still held"),
        (Aliased, "values.* shares the memory of a parameter"),
    ],
)
def test_a_build_that_cannot_be_deferred_runs_in_full(make: type[nn.Module], reason: str) -> None:
    def seeded() -> nn.Module:
        seed()
        return make()

    reasons = []
    for rank in (0, 1):
        model, deferred, why = build_deferred(seeded, Ranks(rank=rank))
        reasons.append(why)
        if why:
            assert deferred is None
            expected = seeded().state_dict()
            for name, value in model.state_dict().items():
                assert value.is_meta == (make is OnMeta)
                assert make is OnMeta or torch.equal(value, expected[name])
    KEPT.clear()
    # One rank suffices: the ranks exchange their reasons.
    assert any(re.search(reason, why) for why in reasons), reasons
