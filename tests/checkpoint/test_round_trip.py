"""Any state of a training run is restored exactly, or refused at the save."""

import json

import pytest
import torch
import xxhash
from torch import nn

from hpcrun.checkpoint.checkpointer import Checkpointer
from hpcrun.checkpoint.folder import folder_engine, folder_store
from hpcrun.checkpoint.sharded.rank_file import StoreReader
from hpcrun.checkpoint.state.capture import apply_shared, capture_shared, template
from hpcrun.ranks.collective import Ranks
from hpcrun.storage.errors import CheckpointError, DamagedCheckpoint
from hpcrun.storage.index import INDEX, Piece, Place, TensorEntry, covered
from hpcrun.storage.store import CheckpointStore

from .single_rank import engine, save
from .test_state import require_equal


class Odd(nn.Module):
    """A model with parameters for the optimizer's groups, and buffers of every layout."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        for name in ("a", "b", "c"):
            self.register_parameter(name, nn.Parameter(torch.rand(3).to(dtype)))
        self.register_buffer("nothing", torch.empty(0, 3))
        self.register_buffer("image", torch.rand(1, 2, 3, 3).to(memory_format=torch.channels_last))
        self.register_buffer("turned", torch.rand(3, 4).t())

    def groups(self, *names, kind=torch.optim.AdamW, **options):
        rates = (0.1, 0.5)
        groups = [
            {"params": [getattr(self, each) for each in group], "lr": rate}
            for group, rate in zip(names, rates, strict=False)
        ]
        return kind(groups, **options)

    def train(self, optimizer):
        (self.a + self.b + self.c).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def saved(folder, **more):
    model = Odd()
    optimizer = model.groups("ab", "c")
    model.train(optimizer)
    with Checkpointer(folder, model=model, optimizer=optimizer, **more) as ckpt:
        ckpt.save(1)
    return model


def test_every_layout_and_type_comes_back(tmp_path):
    torch.manual_seed(0)
    extra = {
        "turned": torch.rand(3, 4).t(),
        "stretched": torch.ones(1).expand(5),
        "number": torch.tensor(2.5),
        "bool": torch.tensor([True, False]),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "half": torch.rand(3).to(torch.bfloat16),
        "byte": torch.rand(3).to(torch.float8_e4m3fn).view(torch.uint8),
        "nothing": torch.empty(2, 0),
        "plain": {"text": "ü", "pair": (1, 2.5), "nested": [{}, [], None, b"x"]},
    }
    before = saved(tmp_path / "checkpoints", extra=dict(extra))
    after = Odd()
    ckpt = Checkpointer(
        tmp_path / "checkpoints", model=after, optimizer=after.groups("ba", "c")
    )  # a different order within the group
    assert ckpt.restore() == 1
    require_equal(ckpt.extra, extra)
    require_equal(dict(after.state_dict()), dict(before.state_dict()))
    assert after.image.stride() == before.image.stride()


def test_a_new_schedule_and_scaler_start_fresh_with_a_note(tmp_path):
    model = saved(tmp_path / "checkpoints", scaler=torch.amp.GradScaler("cpu", enabled=False))
    optimizer = model.groups("ab", "c")
    more = {
        "scaler": torch.amp.GradScaler("cpu"),
        "scheduler": torch.optim.lr_scheduler.LinearLR(optimizer),
    }
    ckpt = Checkpointer(tmp_path / "checkpoints", model=model, optimizer=optimizer, **more)
    assert ckpt.restore() == 1
    assert [note[:43] for note in ckpt.notes] == [
        "the checkpoint has no state of a scaler; it",
        "the checkpoint has no state of a scheduler;",
    ]


def test_a_schedule_with_milestones_continues(tmp_path):
    def parts():
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5, 5])
        return {"model": model, "optimizer": optimizer, "scheduler": schedule}

    first, rates = parts(), {}
    with Checkpointer(tmp_path / "checkpoints", **first) as ckpt:
        for step in range(1, 7):
            first["optimizer"].step()
            first["scheduler"].step()
            rates[step] = first["scheduler"].get_last_lr()
            if step == 3:
                ckpt.save(3)
    without = Checkpointer(tmp_path / "checkpoints", **parts() | {"scheduler": None}, every=0)
    assert without.restore() == 3
    assert without.notes == (
        "the checkpoint's state of a scheduler is not used; this training run has none",
    )
    again = parts()
    assert Checkpointer(tmp_path / "checkpoints", **again).restore() == 3
    for step in range(4, 7):
        again["optimizer"].step()
        again["scheduler"].step()
        assert again["scheduler"].get_last_lr() == rates[step]


@pytest.mark.parametrize(
    ("build", "why"),
    [
        (
            lambda model: model.groups("ac", "b"),
            "c is in group 0 of the optimizer, but in another group in the checkpoint",
        ),
        (
            lambda model: model.groups("a", "bc"),
            "group 0 of the checkpoint's optimizer has 2 parameters, but here it has 1",
        ),
        (
            lambda model: model.groups("abc"),
            "optimizer has 2 parameter groups, but this one has 1",
        ),
        (
            lambda model: model.groups("ab", "c", kind=torch.optim.SGD),
            "optimizer had the option amsgrad but not dampening, so it was not SGD",
        ),
        (
            lambda model: model.groups("ab", "c", amsgrad=True),
            "the optimizer keeps max_exp_avg_sq, which the checkpoint does not have",
        ),
        (
            lambda model: model.register_buffer("d", torch.ones(1)) or model.groups("ab", "c"),
            "d is in the model, but not in the checkpoint",
        ),
        (
            lambda model: model.groups("ab", "c", kind=Elsewhere),
            r"Elsewhere keeps its state in its inner \(AdamW\), so a checkpoint would miss it",
        ),
        (
            lambda model: model.groups("ab") and torch.optim.AdamW([nn.Parameter(torch.ones(3))]),
            r"parameter 0 of group 0 of the optimizer, of shape \(3,\), is not part of the model",
        ),
    ],
)
def test_a_checkpoint_of_another_run_leaves_the_state_unchanged(tmp_path, build, why):
    saved(tmp_path / "checkpoints")
    model = Odd()
    optimizer = build(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    store = folder_store(tmp_path / "checkpoints")
    restoring = folder_engine(store, Ranks(), pinned=False).restore
    with pytest.raises(CheckpointError, match=why):
        restoring(template(model, optimizer))
    require_equal(dict(model.state_dict()), before)
    assert not optimizer.state
    assert all(parameter.grad is None for parameter in model.parameters())
    with pytest.raises(CheckpointError, match=why):
        apply_shared(restoring(lambda *_: {}).shared, model, optimizer)


class Elsewhere(torch.optim.Optimizer):
    """An optimizer with its state in an inner optimizer, like ZeroRedundancyOptimizer."""

    def __init__(self, groups, **options):
        super().__init__(groups, {"lr": 0.1})
        self.inner = torch.optim.AdamW(self.param_groups, **options)


def test_element_types_are_not_converted_silently(tmp_path):
    saved(tmp_path / "checkpoints")
    model = Odd(torch.bfloat16)
    ckpt = Checkpointer(tmp_path / "checkpoints", model=model, optimizer=model.groups("ab", "c"))
    with pytest.raises(
        CheckpointError, match=r"a is float32 in the checkpoint, but bfloat16 in the model"
    ):
        ckpt.restore()


class Precise(torch.optim.SGD):
    """An optimizer that keeps full-precision copies of bfloat16 weights."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                own = self.state[p].setdefault("whole", p.detach().float())
                own.sub_(p.grad.float(), alpha=group["lr"] / 1000)
                p.data.copy_(own)


def closure_of(model, optimizer):
    def closure():
        optimizer.zero_grad()
        loss = (model(torch.tensor([[1, 2]])) - 0.7).float().square().sum()
        loss.backward()
        return loss

    return closure


@pytest.mark.parametrize(
    "kind",
    [
        lambda model: torch.optim.LBFGS(model.parameters(), max_iter=2),
        lambda model: torch.optim.SparseAdam(model.parameters()),
        lambda model: Precise(model.bfloat16().parameters(), lr=0.1),
    ],
    ids=["LBFGS", "SparseAdam", "in full precision"],
)
def test_state_that_a_zero_step_cannot_create_is_restored_too(tmp_path, kind):
    def build():
        torch.manual_seed(0)
        model = nn.EmbeddingBag(5, 3, sparse=True)
        optimizer = kind(model)
        model.sparse = isinstance(optimizer, torch.optim.SparseAdam)
        closure = closure_of(model, optimizer)

        def step():
            closure()
            optimizer.step(closure if isinstance(optimizer, torch.optim.LBFGS) else None)

        return model, optimizer, step

    model, optimizer, step = build()
    with Checkpointer(tmp_path / "checkpoints", model=model, optimizer=optimizer) as ckpt:
        step()
        ckpt.save(1)
    step()
    again, other, step = build()
    assert Checkpointer(tmp_path / "checkpoints", model=again, optimizer=other).restore() == 1
    step()
    require_equal(dict(again.state_dict()), dict(model.state_dict()))
    require_equal(other.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize(
    ("build", "why"),
    [
        (
            lambda: nn.LazyLinear(2),
            "weight has no shape yet, so it can be neither saved nor loaded",
        ),
        (lambda: nn.Linear(3, 2, device="meta"), r"weight is on the meta device, .* to_empty\(\)"),
    ],
)
def test_a_model_without_memory_is_refused(tmp_path, build, why):
    first = nn.Linear(3, 2)
    with Checkpointer(tmp_path, model=first, optimizer=torch.optim.SGD(first.parameters())) as ckpt:
        ckpt.save(1)
    model = build()
    with pytest.raises(CheckpointError, match=why):
        Checkpointer(tmp_path, model=model, optimizer=torch.optim.SGD(model.parameters())).restore()


def test_parameters_omitted_from_the_state_dict_are_kept_unless_trained(tmp_path):
    model = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model[1].parameters())

    def leave_out(module, state, prefix, metadata):
        for name in ("0.weight", "0.bias"):
            state.pop(name)

    model.register_state_dict_post_hook(leave_out)
    with Checkpointer(tmp_path, model=model, optimizer=optimizer) as ckpt:
        ckpt.save(1)
    whole = {name: value.clone() for name, value in model.named_parameters()}
    with torch.no_grad():
        model[1].weight.zero_()
    assert Checkpointer(tmp_path, model=model, optimizer=optimizer).restore() == 1
    assert all(torch.equal(value, whole[name]) for name, value in model.named_parameters())
    model[0].requires_grad_(True)
    with pytest.raises(
        CheckpointError, match=r"0\.weight is trained, but not in the model's state"
    ):
        capture_shared(model, optimizer, extra={})


def test_the_extra_state_of_a_module_restores_in_any_size(tmp_path):
    class Scaled(nn.Linear):
        def get_extra_state(self):
            return {"history": self.history, "count": len(self.history)}

        def set_extra_state(self, state):
            self.history = state["history"]

    def build(length):
        model = Scaled(2, 1)
        model.history = torch.rand(length)
        return model, torch.optim.SGD(model.parameters())

    model, optimizer = build(3)
    with Checkpointer(tmp_path, model=model, optimizer=optimizer) as ckpt:
        ckpt.save(1)
    again, other = build(0)
    assert Checkpointer(tmp_path, model=again, optimizer=other).restore() == 1
    assert torch.equal(again.history, model.history)


def test_a_tensor_that_cannot_be_loaded_is_refused_when_saved(tmp_path):
    model = Odd()
    model.register_buffer("mask", torch.ones(1, 3).expand(4, 3))
    with pytest.raises(CheckpointError, match=r"mask: its elements share memory .* \.clone\(\)"):
        Checkpointer(tmp_path / "checkpoints", model=model, optimizer=model.groups("ab", "c"))


@pytest.mark.parametrize("name", ["../rank-00000.bin", "/etc/passwd", "manifest.json"])
def test_a_forged_index_does_not_lead_out_of_its_folder(root, name):
    assert save(engine(root, "7-0"), 1).ok
    store = CheckpointStore(root, "7-1", patience=0)
    index = store.path(1) / INDEX
    values = json.loads(index.read_text())
    values["files"] = [name]
    forged = json.dumps(values).encode()
    manifest = store.manifest(1)
    draft = store.begin(2)
    with store.open_file(draft, INDEX) as stream:
        stream.write(forged)
    store.commit(draft, 2, [stream.record], manifest.world_size, {}, lambda: None)
    assert stream.record.xxh3 == xxhash.xxh3_128_hexdigest(forged)
    with pytest.raises(DamagedCheckpoint, match="not a valid index"):
        StoreReader(store, 2)


@pytest.mark.parametrize(
    ("boxes", "whole"),
    [
        ([((0, 0), (2, 4)), ((2, 0), (1, 4))], True),
        ([((0, 0), (3, 1)), ((0, 1), (3, 3)), ((0, 0), (0, 4))], True),
        ([((0, 0), (2, 4))], False),
        ([((1, 0), (3, 4))], False),
        ([((0,), (12,))], False),
    ],
)
def test_pieces_cover_a_tensor_only_without_a_gap(boxes, whole):
    place = Place("rank-00000.bin", 0, 0, "")
    pieces = tuple(Piece(offsets, sizes, place) for offsets, sizes in boxes)
    assert covered(TensorEntry("float32", (3, 4), pieces)) is whole
