"""Initial weights of files: they replace those of a deferred build, and a resume reads none."""

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import TensorDataset

from hpcrun.config import override_layer, resolve
from hpcrun.errors import UserError
from hpcrun.ranks.collective import Ranks
from hpcrun.ranks.distributed import DistributedConfig
from hpcrun.train.model.deferred import build_deferred
from hpcrun.train.model.initial_weights import covers, load_initial_weights
from hpcrun.train.setup.task import OpenedTask, make_model, open_on_rank
from tests.train.deferring import Varied, require_same
from tests.train.faulty_tasks import Regression


def test_initial_weights_of_files_replace_those_of_the_build(tmp_path: Path) -> None:
    class Filed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.inner = nn.Embedding(7, 300), nn.Linear(300, 300)
            self.out = nn.Linear(300, 7, bias=False)
            self.out.weight = self.tokens.weight
            self.norm = nn.BatchNorm1d(3)
            self.register_buffer("turn", torch.ones(2), persistent=False)

    torch.manual_seed(1)
    wanted = {key: value + 1 for key, value in Filed().state_dict().items() if key != "out.weight"}
    first = dict(list(wanted.items())[:3])
    save_file(first, tmp_path / "1.safetensors")
    rest = {key: value for key, value in wanted.items() if key not in first}
    save_file(rest, tmp_path / "2.safetensors")

    def make() -> nn.Module:
        model = Filed()
        load_initial_weights(model, str(tmp_path))
        return model

    require_same(make)
    deferred = build_deferred(make, Ranks())[1]
    assert deferred is not None
    for name, value in deferred.weights.items():
        assert torch.equal(value, wanted[name]), name
    assert torch.equal(deferred.model.norm.running_mean, wanted["norm.running_mean"])  # type: ignore[union-attr, arg-type]

    def refused(change: dict[str, torch.Tensor]) -> str:
        save_file({**rest, **change}, tmp_path / "2.safetensors")
        with pytest.raises(UserError) as error:
            build_deferred(make, Ranks())
        return str(error.value)

    assert "has extra, which the model does not have" in refused({"extra": torch.ones(1)})
    assert "norm.weight has the shape (4,)" in refused({"norm.weight": torch.ones(4)})
    assert "tokens.weight is in" in refused({"tokens.weight": wanted["tokens.weight"]})
    rest.pop("norm.bias")
    assert "has no norm.bias (1 tensors are missing)" in refused({})
    (tmp_path / "1.safetensors").write_bytes(b"no")
    assert "cannot be read" in refused({})


@pytest.mark.parametrize("world", [1, 2])
def test_a_resume_reads_no_file_of_initial_weights_unless_a_checkpoint_lacks_some(
    world: int,
) -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 3)

        def state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
            return {"inner.bias": self.inner.bias}

    class Given(Regression):
        kind: Callable[[], nn.Module] = Varied

        def build_model(self) -> nn.Module:
            return self.kind()

    class Reads(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 3)

        def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
            return {name: torch.tensor(value.tolist()) for name, value in self.named_parameters()}

    class Anchored(Given):
        def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
            self.anchor = [parameter.clone() for parameter in model.parameters()]
            return torch.optim.SGD(model.parameters(), lr=0.1)

    config = resolve([override_layer(["train.parallel=fsdp", "train.init_from=/nowhere"])])
    place = DistributedConfig(world_size=world)
    task = Given(config)
    model, deferred = make_model(task, config, place, Ranks(), resumes=True)
    assert (covers(task, model), deferred is not None) == (True, world > 1)
    # On the meta device its state dict has no values to read.
    assert not covers(task, Reads().to("meta"))
    for task, kind in ((Anchored(config), Varied), (Given(config), Frozen)):
        Given.kind = kind
        for resumes in (False, True):
            with pytest.raises(UserError, match=r"train\.init_from: /nowhere does not exist"):
                make_model(task, config, place, Ranks(), resumes=resumes)


def in_a_thread(compute: Callable[[], torch.Tensor]) -> torch.Tensor:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(compute).result()


USES: dict[str, Callable[[nn.Module], Callable[[], Any]]] = {
    "list": lambda model: functools.partial(lambda held: held[1](torch.ones(1, 3)), [*model]),
    "dict": lambda model: functools.partial(
        lambda held: held["0.bias"] * 2, dict(model.named_parameters())
    ),
    "closure": lambda model: lambda: model(torch.ones(1, 3)),
    "view": lambda model: lambda: model[0].weight.data.view(-1)[:3],  # type: ignore[union-attr, operator, misc]
    "values": lambda model: lambda: torch.tensor(model[0].weight.tolist()),  # type: ignore[union-attr, operator]
    "buffer": lambda model: lambda: model.get_buffer("2.running_mean") + 1,
    "thread": lambda model: lambda: in_a_thread(lambda: model(torch.ones(1, 3))),
}


@pytest.mark.parametrize("use", USES)
def test_a_dataset_computes_with_the_initial_weights_on_a_resume_too(
    tmp_path: Path, use: str
) -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.BatchNorm1d(3)).eval()

    class Featured(Regression):
        def build_model(self) -> nn.Module:
            built = model()
            self.features = USES[use](built)
            return built

        def train_dataset(self) -> Any:
            return TensorDataset(self.features().detach())

    class Idle(Featured):
        def train_dataset(self) -> Any:
            return TensorDataset(torch.ones(3))

    torch.manual_seed(9)
    given = {key: value + 1 for key, value in model().state_dict().items()}
    file = tmp_path / "model.safetensors"
    save_file(given, file)
    config, place = resolve([override_layer([f"train.init_from={file}"])]), DistributedConfig()

    def opened(kind: type[Featured], *, resumes: bool) -> OpenedTask:
        task = kind(config)
        model, _ = make_model(task, config, place, Ranks(), resumes=resumes)
        return open_on_rank(task, config, place, model, resumes=resumes)

    first, second = (opened(Featured, resumes=resumes) for resumes in (False, True))
    assert torch.equal(first.dataset[0][0], second.dataset[0][0])
    assert all(torch.equal(value, given[key]) for key, value in second.model.state_dict().items())
    file.unlink()
    assert opened(Idle, resumes=True).model
    with pytest.raises(UserError, match="does not exist"):
        opened(Featured, resumes=True)
