"""A deferred build gives the bits of a normal build, or is refused."""

import functools
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import TensorDataset, random_split

from hpcrun.cluster.distributed import DistributedConfig
from hpcrun.config import override_layer, resolve
from hpcrun.errors import UserError
from hpcrun.tasks import BUILTIN
from hpcrun.tasks.finding import task_path
from hpcrun.tasks.gpt import GPT
from hpcrun.tasks.options.language_model import LanguageModelShape
from hpcrun.train.deferred import tape
from hpcrun.train.deferred.build import Deferred, build_deferred
from hpcrun.train.deferred.later_draws import LaterDraws
from hpcrun.train.deferred.tape import Unreplayable
from hpcrun.train.model.initial_weights import load_initial_weights
from hpcrun.train.setup import task as setup_task
from hpcrun.train.setup.deferral import build_model, covers
from hpcrun.train.setup.task import OpenedTask
from hpcrun.train.step.trainer import DistributedAMPTrainer
from hpcrun.train.task import load_task
from tests.train.zoo import Regression

OWN = torch.Generator()


class Varied(nn.Module):
    """A model with the ways of initialization that models use, and some that are hard to defer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.look = nn.Sequential(nn.Conv1d(1, 2, 3), nn.BatchNorm1d(2), nn.Flatten())
        self.found = self.look(torch.zeros(2, 1, 8)).shape[1]
        self.head = nn.Linear(self.found, 8)
        nn.init.orthogonal_(self.head.weight)
        self.tokens = nn.Embedding(10, 8, padding_idx=0)
        self.tied = nn.Linear(8, 10, bias=False)
        self.tied.weight = self.tokens.weight
        self.place = nn.Parameter(torch.zeros(5, 8))
        nn.init.trunc_normal_(self.place, std=0.02)
        self.rates = torch.linspace(0, 0.3, 4).tolist()
        self.large = nn.Parameter(torch.zeros(400, 400))
        self.large.data.normal_().mul_(0.5)
        turns = 1 / (10000 ** (torch.arange(0, 8, 2) / 8))
        self.register_buffer("turn", torch.outer(torch.arange(9.0), turns), persistent=False)
        self.register_buffer("features", torch.randn(3, 3))
        self.table = [torch.arange(5) * 2]
        with torch.random.fork_rng():
            torch.manual_seed(9)
            self.forked = nn.Linear(3, 3)
        state = torch.get_rng_state()
        self.first = nn.Linear(3, 3)
        torch.set_rng_state(state)
        self.again = nn.Linear(3, 3)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.numbers = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.drawn = nn.Parameter(torch.from_numpy(np.random.rand(4).astype("float32")))
        self.pair = nn.Parameter(torch.full((2,), random.random()))
        self.own = nn.Parameter(torch.randn(20, generator=OWN))
        for parameter in self.encoder.parameters():
            parameter.data.mul_(1.5)
        self.load_state_dict({"first.bias": torch.arange(3.0)}, strict=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        x = self.encoder(x.unsqueeze(1)).squeeze(1)
        x = self.head(self.look(x.unsqueeze(1))) + self.place.sum(0) + self.large.sum()
        spread = self.first(x[:, :3]) + self.again(x[:, :3]) + self.forked(x[:, :3])
        rest = (self.numbers.sum() + self.drawn.sum() + self.pair.sum() + self.own.sum()) ** 2
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
    OWN.manual_seed(4)


def states() -> list[bytes]:
    """Return the states of all generators that a build may use."""
    now = [torch.get_rng_state(), OWN.get_state()]
    return [state.numpy().tobytes() for state in now] + [repr(random.getstate()).encode()]


def draws() -> list[torch.Tensor]:
    """Draw as a dataset may do: from a fork, from a copy of the generator, after a seed, and from itself."""
    with torch.random.fork_rng():
        forked = torch.randn(2)
    with torch.random.fork_rng():
        torch.manual_seed(8)
        seeded = torch.randperm(5)
    copied = torch.rand(2, generator=torch.Generator().set_state(torch.get_rng_state()))
    split = random_split(range(9), [4, 5])[0].indices
    return [forked, seeded, copied, torch.tensor(split), torch.rand(1)]


def weights(deferred: Deferred) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    deferred.compute(lambda name, value: found.update({name: value.clone()}))
    assert list(found) == deferred.order()
    return found


def require_same(make: Callable[[], nn.Module]) -> None:
    seed()
    normal = make()
    drawn, after = draws(), states()
    seed()
    deferred = build_deferred(make)
    # A tensor of numpy is there already.
    found = {**dict(deferred.model.named_parameters()), **weights(deferred)}
    assert found.keys() == dict(normal.named_parameters()).keys()
    for name, value in normal.named_parameters():
        assert torch.equal(value, found[name]), name
        assert value.stride() == found[name].stride()
        assert value.requires_grad == dict(deferred.model.named_parameters())[name].requires_grad
    for name, buffer in normal.named_buffers():
        assert torch.equal(buffer, dict(deferred.model.named_buffers())[name]), name
    with LaterDraws(deferred):
        found_later = draws()
    assert all(map(torch.equal, drawn, found_later))
    assert states() == after


def test_a_deferred_build_gives_the_bits_of_a_normal_build() -> None:
    require_same(Coarse)


@pytest.mark.parametrize("name", [*BUILTIN, "bdh"])
def test_every_built_in_task_can_be_deferred(name: str, tmp_path: Path) -> None:
    settings = ["task=language-model", "model.kind=bdh"] if name == "bdh" else [f"task={name}"]
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
        trainer = DistributedAMPTrainer(
            deferred.model,
            lambda model: torch.optim.SGD(model.parameters()),
            distributed=DistributedConfig(
                world_size=world, rank=0, num_gpus_per_node=8, num_nodes=8
            ),
            parallel="fsdp",
            device="cpu",
        )
        trainer.wrap_model()
        assert trainer._strategy.auto_reduces
        shards: list[Any] = list(trainer.module.parameters())
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
            r"it reads the values of a tensor \(aten::_local_scalar_dense\) at .*test_deferred.py:",
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
    deferred = build_deferred(make)
    for name, value in weights(deferred).items():
        assert torch.equal(value, wanted[name]), name
    assert torch.equal(deferred.model.norm.running_mean, wanted["norm.running_mean"])  # type: ignore[union-attr, arg-type]

    def refused(change: dict[str, torch.Tensor]) -> str:
        save_file({**rest, **change}, tmp_path / "2.safetensors")
        with pytest.raises(UserError) as error:
            build_deferred(make)
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
    model, deferred = build_model(task, config, place, resumes=True)
    assert (covers(task, model), deferred is not None) == (True, world > 1)
    # On the meta device its state dict has no values to read.
    assert not covers(task, Reads().to("meta"))
    for task, kind in ((Anchored(config), Varied), (Given(config), Frozen)):
        Given.kind = kind
        for resumes in (False, True):
            with pytest.raises(UserError, match=r"train\.init_from: /nowhere does not exist"):
                build_model(task, config, place, resumes=resumes)


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
        return setup_task._open(kind(config), config, place, resumes=resumes)

    first, second = (opened(Featured, resumes=resumes) for resumes in (False, True))
    assert torch.equal(first.dataset[0][0], second.dataset[0][0])
    assert all(torch.equal(value, given[key]) for key, value in second.model.state_dict().items())
    file.unlink()
    assert opened(Idle, resumes=True).model
    with pytest.raises(UserError, match="does not exist"):
        opened(Featured, resumes=True)


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
