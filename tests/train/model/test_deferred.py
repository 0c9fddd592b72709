"""A deferred build gives the bits of a normal build, or every rank builds in full."""

import functools
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import TensorDataset

from hpcrun.api.submission.choose_config import task_path
from hpcrun.config import override_layer, resolve
from hpcrun.config.tasks import BUILTIN
from hpcrun.config.tasks.language_model import LanguageModelShape
from hpcrun.config.training import FSDP
from hpcrun.errors import UserError
from hpcrun.ranks.collective import Ranks
from hpcrun.ranks.distributed import DistributedConfig
from hpcrun.tasks.llama import Llama
from hpcrun.train.model.deferred import build_deferred
from hpcrun.train.parallel.fsdp import FSDPStrategy
from hpcrun.train.setup import make_model, open_on_rank
from hpcrun.train.task import load_task
from tests.support.training.deferring import Coarse, require_same, seed
from tests.support.training.faulty_tasks import Regression


def test_a_deferred_build_gives_the_bits_of_a_normal_build() -> None:
    require_same(Coarse)


@pytest.mark.parametrize("name", [*BUILTIN, "bdh"])
def test_every_built_in_task_can_be_deferred(name: str) -> None:
    settings = ["task=examples.bdh:BDHTask" if name == "bdh" else f"task={name}"]
    config = resolve([override_layer(settings)])
    task = load_task(config.model_copy(update={"task": task_path(config.task)}))
    require_same(task.build_model)


def test_seven_billion_parameters_need_no_memory_but_on_rank_0() -> None:
    """Build and shard for a world of 64 ranks with collectives that do nothing."""
    world = 64
    shape = LanguageModelShape(width=4096, layers=35, heads=32, context=128)
    model, built, _ = build_deferred(lambda: Llama(shape), Ranks(rank=1))
    assert built is not None
    whole = sum(p.nbytes for p in model.parameters())
    assert whole > 28e9
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=world)  # type: ignore[no-untyped-call]
    try:
        place = DistributedConfig(world_size=world, rank=1, num_gpus_per_node=8, num_nodes=8)
        strategy = FSDPStrategy(place, FSDP(), "fp32")
        wrapped = strategy.wrap(strategy.place(model, torch.device("cpu")), None)
        assert strategy.auto_reduces
        shards: list[Any] = list(wrapped.parameters())
        assert sum(p.to_local().nbytes for p in shards) < 1.01 * whole / world
    finally:
        dist.destroy_process_group()


def test_draws_of_datasets_do_not_depend_on_the_build() -> None:
    class Drawing(Regression):
        def train_dataset(self) -> Any:
            return TensorDataset(torch.randn(8, 3))

    found = []
    for rank, setting in ((0, "false"), (0, "true"), (1, "true")):
        config = resolve([override_layer(["train.parallel=fsdp", f"fsdp.deferred_init={setting}"])])
        place = DistributedConfig(world_size=2, num_gpus_per_node=2, rank=rank, local_rank=rank)
        task = Drawing(config)
        model, built = make_model(task, config, place, Ranks(rank=rank))
        assert (built is not None) == (setting == "true")
        found.append(open_on_rank(task, config, place, model, resumes=False).dataset[0][0])
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.norm = self.layer.weight.norm().item()


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
        KEPT.append(torch.randn(3))


class Draws(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.order = torch.randperm(9, device="cpu").tolist()


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
            r"RuntimeError: Tensor.item\(\) cannot be called on meta tensors at .*test_deferred.py:",
        ),
        (partial(nn.Linear, 3, 3, device="meta"), "weight is on the device meta"),
        (Hooked, "weight has a hook"),
        (Keeps, "held outside parameters, buffers and attributes"),
        (Draws, "it draws random values on the device cpu at .*test_deferred.py:"),
        (Aliased, "values.* shares the memory of a parameter"),
    ],
)
def test_a_build_that_cannot_be_deferred_runs_in_full(
    make: Callable[[], nn.Module], reason: str
) -> None:
    def seeded() -> nn.Module:
        seed()
        return make()

    reasons = []
    for rank in (0, 1):
        model, built, why = build_deferred(seeded, Ranks(rank=rank))
        reasons.append(why)
        if why:
            assert built is None
            expected = seeded().state_dict()
            for name, value in model.state_dict().items():
                assert value.is_meta == expected[name].is_meta
                assert value.is_meta or torch.equal(value, expected[name])
    KEPT.clear()
    # One rank suffices: the ranks exchange their reasons.
    assert any(re.search(reason, why) for why in reasons), reasons


@functools.cache
def table() -> torch.Tensor:
    return torch.arange(4.0)


class Cached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("twice", 2 * table())


def test_a_cached_tensor_of_a_build_is_refused() -> None:
    with pytest.raises(UserError, match=r"twice.* has no values.*fsdp\.deferred_init=false"):
        build_deferred(Cached, Ranks(rank=1))
    table.cache_clear()
