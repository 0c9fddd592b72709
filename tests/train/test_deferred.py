"""A deferred build gives the bits of a normal build."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import TensorDataset

from hpcrun.api.submission.choose_config import task_path
from hpcrun.config import override_layer, resolve
from hpcrun.config.training import FSDP
from hpcrun.ranks.distributed import DistributedConfig
from hpcrun.tasks import BUILTIN
from hpcrun.tasks.gpt import GPT
from hpcrun.tasks.options import LanguageModelShape
from hpcrun.train.deferred import tape
from hpcrun.train.deferred.build import build_deferred
from hpcrun.train.parallel.fsdp import FSDPStrategy
from hpcrun.train.setup.task import open_on_rank
from hpcrun.train.task import load_task
from tests.train.deferring import OWN, Coarse, Varied, require_same, seed
from tests.train.faulty_tasks import Regression


def test_a_deferred_build_gives_the_bits_of_a_normal_build() -> None:
    require_same(Coarse)


@pytest.mark.parametrize("name", [*BUILTIN, "bdh"])
def test_every_built_in_task_can_be_deferred(name: str, tmp_path: Path) -> None:
    settings = ["task=examples.bdh:BDHTask" if name == "bdh" else f"task={name}"]
    if name == "token-model":
        tokens = tmp_path / "tokens.bin"
        tokens.write_bytes(bytes(2 * 4096))
        settings += [f"data.paths=[{tokens}]", "model.vocabulary=64"]
    config = resolve([override_layer(settings)])
    task = load_task(config.model_copy(update={"task": task_path(config.task)}))
    require_same(task.build_model)


def test_only_a_few_weights_exist_at_a_time() -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(100, 100, bias=False) for _ in range(8))
            for layer in self.layers:
                nn.init.normal_(layer.weight)

    deferred = build_deferred(Deep)
    living: list[int] = []
    original = torch.UntypedStorage

    def counted(size: int) -> torch.UntypedStorage:
        living.append(size)
        return original(size)

    held: list[str] = []
    torch.UntypedStorage = counted  # type: ignore[assignment, misc]
    try:
        deferred.compute(lambda name, _: held.append(f"{name} after {len(living)}"))
    finally:
        torch.UntypedStorage = original  # type: ignore[misc]
    # Eight unused draws move the generator first; then each weight is allocated and handed over.
    assert held == [f"layers.{place}.weight after {8 + place + 1}" for place in range(8)]
    assert sum(living) == 16 * 40_000


def test_seven_billion_parameters_need_a_shard_and_one_parameter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Build for a world of 64 ranks with collectives that do nothing, and replay sizes, not memory."""
    world = 64
    shape = LanguageModelShape(width=4096, layers=35, heads=32, context=128)
    drawn: list[tape.Call] = []
    original = tape.Call.run
    monkeypatch.setattr(
        tape.Call, "run", lambda call, content: drawn.append(call) or original(call, content)
    )
    deferred = build_deferred(lambda: GPT(shape))
    # No large draw happens at the recording, though the model has a separate generator.
    assert not any(call.draw for call in drawn)
    sizes, whole = deferred.tape.sizes, sum(p.nbytes for p in deferred.model.parameters())
    assert whole > 28e9
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)  # type: ignore[no-untyped-call]
    try:
        place = DistributedConfig(world_size=world, rank=0, num_gpus_per_node=8, num_nodes=8)
        strategy = FSDPStrategy(place, FSDP(), "fp32")
        wrapped = strategy.wrap(strategy.place(deferred.model, torch.device("cpu")), None)
        assert strategy.auto_reduces
        shards: list[Any] = list(wrapped.parameters())
        assert sum(p.to_local().nbytes for p in shards) < 1.01 * whole / world
    finally:
        dist.destroy_process_group()
    held = most = 0

    class Sized:
        def __init__(self, size: int) -> None:
            nonlocal held, most
            self.size = size
            held += size
            most = max(most, held)

        def __del__(self) -> None:
            nonlocal held
            held -= self.size

    def run(call: tape.Call, content: Callable[[int], Any]) -> dict[int, Any]:
        for key in call.reads | call.writes:
            content(key)
        return {key: Sized(sizes[key]) for key in call.creates}

    monkeypatch.setattr(tape, "new_storage", Sized)
    monkeypatch.setattr(tape.Call, "run", run)
    given: list[int] = []
    wanted = {each.view.storage for each in deferred.parameters}
    deferred.tape.replay(wanted, lambda key, _: given.append(key))
    assert set(given) == wanted
    assert most == 4 * 4096 * 4 * 4096


def test_a_build_may_load_all_weights_through_one_array() -> None:
    class Loaded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(400, 400) for _ in range(3))
            values = np.empty((400, 400), dtype="float32")
            for number, layer in enumerate(self.layers):
                values[:] = number
                layer.weight.data.copy_(torch.from_numpy(values))

    require_same(Loaded)


def test_a_rebuild_starts_as_the_recorded_build_did() -> None:
    seed()
    normal = Varied()
    seed()
    deferred = build_deferred(Varied)
    OWN.manual_seed(77)

    def make() -> nn.Module:
        random.seed(4)
        np.random.seed(4)
        torch.manual_seed(4)
        return Varied()

    rebuilt = deferred.rebuild(make)
    assert all(
        torch.equal(a, b) for a, b in zip(normal.parameters(), rebuilt.parameters(), strict=True)
    )
    assert OWN.initial_seed() == 77


def test_a_dataset_s_draw_after_a_deferred_build_shows_the_watchdog_progress() -> None:
    class Drawing(Regression):
        def train_dataset(self) -> Any:
            return TensorDataset(torch.randn(8, 3))

    config = resolve([override_layer(["train.parallel=fsdp", "fsdp.deferred_init=true"])])
    advanced: list[None] = []
    opened = open_on_rank(
        Drawing(config),
        config,
        DistributedConfig(world_size=2, num_gpus_per_node=2),
        resumes=False,
        advance=lambda: advanced.append(None),
    )
    assert opened.deferred is not None
    assert len(advanced) >= 2
