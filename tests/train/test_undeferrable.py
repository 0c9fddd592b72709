"""A build that cannot be deferred is refused, and leaves no trace."""

import functools

import pytest
import torch
from torch import nn

from hpcrun.train.deferred.build import build_deferred
from hpcrun.train.deferred.tape import Unreplayable
from tests.train.deferring import OWN, seed, states


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


class Uninitialized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(5))


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
        KEPT.append(self.layer.weight)


OUTSIDE = torch.ones(3)


class ChangesOutside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, generator=OWN))
        OUTSIDE.mul_(2)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (
            Reads,
            r"it reads the values of a tensor \(aten::_local_scalar_dense\) at .*test_undeferrable.py:",
        ),
        (ReadsInSilence, "it reads the values of a tensor"),
        (Uninitialized, "weight is uninitialized memory"),
        (OnMeta, "device meta"),
        (Hooked, "weight has a hook"),
        (Keeps, "held outside parameters and buffers"),
        (ChangesOutside, "it changes a tensor that it has not made"),
    ],
)
def test_a_build_that_cannot_be_deferred_is_refused_and_leaves_no_trace(
    make: type[nn.Module], reason: str
) -> None:
    seed()
    before = states()
    with pytest.raises(Unreplayable, match=reason):
        build_deferred(make)
    assert states() == before
    assert OUTSIDE.tolist() == [1, 1, 1]
    KEPT.clear()


def test_a_cache_filled_by_a_refused_build_serves_the_full_build() -> None:
    @functools.cache
    def table(width: int) -> torch.Tensor:
        return torch.outer(torch.arange(4.0), 1 / torch.tensor([1.0] * width))

    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)
            self.register_buffer("turn", table(3), persistent=False)

    with pytest.raises(Unreplayable, match="held outside"):
        build_deferred(Cached)
    assert type(table(3)) is torch.Tensor
    assert Cached().turn.sum() == 18
