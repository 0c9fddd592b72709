"""A deferred build gives the bits of a normal build."""

import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import TensorDataset

from hpcrun.api.submission.choose_config import task_path
from hpcrun.config import override_layer, resolve
from hpcrun.config.training import FSDP
from hpcrun.ranks.collective import Ranks
from hpcrun.ranks.distributed import DistributedConfig
from hpcrun.tasks import BUILTIN
from hpcrun.tasks.gpt import GPT
from hpcrun.tasks.options import LanguageModelShape
from hpcrun.train.model.deferred import build_deferred
from hpcrun.train.parallel.fsdp import FSDPStrategy
from hpcrun.train.setup import make_model, open_on_rank
from hpcrun.train.task import load_task
from tests.train.deferring import Coarse, require_same, seed
from tests.train.faulty_tasks import Regression


def test_a_deferred_build_gives_the_bits_of_a_normal_build() -> None:
    require_same(Coarse)


@pytest.mark.parametrize("name", [*BUILTIN, "bdh"])
def test_every_built_in_task_can_be_deferred(name: str) -> None:
    config = resolve(
        [override_layer(["task=examples.bdh:BDHTask" if name == "bdh" else f"task={name}"])]
    )
    task = load_task(config.model_copy(update={"task": task_path(config.task)}))
    require_same(task.build_model)


def test_shards_of_seven_billion_parameters_need_little_memory() -> None:
    """Build and shard for a world of 64 ranks with collectives that do nothing."""
    world = 64
    shape = LanguageModelShape(width=4096, layers=35, heads=32, context=128)
    with torch.device("meta"):
        model = GPT(shape)
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
    for rank, setting in ((0, "false"), (0, "true")):
        config = resolve([override_layer(["train.parallel=fsdp", f"fsdp.deferred_init={setting}"])])
        place = DistributedConfig(world_size=2, num_gpus_per_node=2, rank=rank, local_rank=rank)
        task = Drawing(config)
        model, built = make_model(task, config, place, Ranks(rank=rank))
        assert (built is not None) == (setting == "true")
        found.append(open_on_rank(task, config, place, model).dataset[0][0])
    assert torch.equal(found[0], found[1])


class OnMeta(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3, device="meta")


class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5))
        self.weight.register_hook(lambda gradient: 2 * gradient)


class Aliased(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.values = self.layer.weight.data


class Locked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.lock = nn.Linear(3, 3), threading.Lock()


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (OnMeta, "device meta"),
        (Hooked, "weight has a hook"),
        (Aliased, "values.* shares the memory of a parameter"),
        (Locked, "it cannot be pickled: TypeError"),
        (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), "it cannot be pickled"),
        (lambda: "a model", "it returns no module"),
    ],
)
def test_a_build_that_cannot_be_deferred_keeps_its_weights(
    make: Callable[[], Any], reason: str
) -> None:
    def seeded() -> Any:
        seed()
        return make()

    model, built, why = build_deferred(seeded, Ranks())
    assert built is None
    assert re.search(reason, why)
    if isinstance(model, nn.Module) and make is not OnMeta:
        for name, value in seeded().state_dict().items():
            assert torch.equal(model.state_dict()[name], value)


def test_a_build_that_changes_its_task_runs_on_every_rank() -> None:
    class Keeps(Regression):
        def build_model(self) -> nn.Module:
            self.kept = 1
            return super().build_model()

    task = Keeps(resolve([]))
    _, built, why = build_deferred(task.build_model, Ranks(), task)
    assert (built, why) == (None, "it sets attributes of the task")
