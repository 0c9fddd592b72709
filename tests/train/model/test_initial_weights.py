"""Initial weights of files: they replace those of a deferred build."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn

from hpcrun.config import override_layer, resolve
from hpcrun.errors import UserError
from hpcrun.ranks.collective import Ranks
from hpcrun.ranks.distributed import DistributedConfig
from hpcrun.train.model.deferred import build_deferred
from hpcrun.train.model.initial_weights import covers, load_initial_weights
from hpcrun.train.setup import make_model
from tests.support.training.deferring import Varied, require_same
from tests.support.training.faulty_tasks import Regression


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


class Fixed(nn.Module):
    """A model with a buffer that is on the CPU also in a deferred build."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("scale", torch.ones(2, device="cpu"))


def test_a_deferred_build_reads_buffers_of_every_format(tmp_path: Path) -> None:
    state = {name: value + 1 for name, value in Fixed().state_dict().items()}
    save_file(state, tmp_path / "one.safetensors")
    dcp.save(state, checkpoint_id=tmp_path / "two", no_dist=True)
    for source in sorted(tmp_path.iterdir()):

        def make(source: Path = source) -> nn.Module:
            model = Fixed()
            load_initial_weights(model, str(source), {})
            return model

        model, deferred, reason = build_deferred(make, Ranks(rank=1))
        assert deferred is not None, (source, reason)
        assert torch.equal(model.scale, state["scale"])


def test_a_checkpoint_covers_a_model_whose_weights_it_holds_all() -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 3)

        def state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
            return {"inner.bias": self.inner.bias}

    class Reads(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 3)

        def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
            return {name: torch.tensor(value.tolist()) for name, value in self.named_parameters()}

    class Anchored(Regression):
        def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
            return torch.optim.SGD(model.parameters(), lr=0.1)

    config = resolve([override_layer(["train.parallel=fsdp"])])
    task = Regression(config)
    assert covers(task, Varied())
    # On the meta device its state dict has no values to read.
    assert not covers(task, Reads().to("meta"))
    assert not covers(task, Frozen())
    assert not covers(Anchored(config), Varied())


@pytest.mark.parametrize("world", [1, 2])
def test_a_resume_reads_initial_weights_only_where_needed(world: int) -> None:
    class Given(Regression):
        def build_model(self) -> nn.Module:
            return Varied()

    class Anchored(Given):
        def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
            return torch.optim.SGD(model.parameters(), lr=0.1)

    missing = resolve([override_layer(["train.parallel=fsdp", "train.init_from=/nowhere"])])
    place = DistributedConfig(world_size=world)
    for task, resumes in ((Given, False), (Anchored, True)):
        with pytest.raises(UserError, match=r"train\.init_from: /nowhere does not exist"):
            make_model(task(missing), missing, place, Ranks(), resumes=resumes)
    assert make_model(Given(missing), missing, place, Ranks(), resumes=True)[0]
