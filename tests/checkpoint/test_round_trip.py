"""Whatever a training may hold comes back as it was, and what would come back otherwise is refused."""

import json

import pytest
import torch
import xxhash
from torch import nn

from hpcrun.checkpoint.checkpointer import Checkpointer
from hpcrun.checkpoint.errors import CheckpointError, DamagedCheckpoint
from hpcrun.checkpoint.index import INDEX
from hpcrun.checkpoint.reading import StoreReader
from hpcrun.checkpoint.store import CheckpointStore

from .single import engine, save
from .test_state import require_equal


class Odd(nn.Module):
    """Parameters for the optimizer's groups, and buffers of every layout."""

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
    )  # in another order within the group
    assert ckpt.restore() == 1
    require_equal(ckpt.extra, extra)
    require_equal(dict(after.state_dict()), dict(before.state_dict()))
    assert after.image.stride() == before.image.stride()


def test_a_schedule_with_milestones_goes_on(tmp_path):
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
            "c is in group 0 of the optimizer, and in another one of the checkpoint's",
        ),
        (
            lambda model: model.groups("ab", "c", kind=torch.optim.SGD, momentum=0.9),
            "the optimizer keeps momentum_buffer of it, and the checkpoint's did not",
        ),
        (
            lambda model: model.groups("ab", "c", amsgrad=True),
            "the optimizer keeps max_exp_avg_sq of it, and the checkpoint's did not",
        ),
    ],
)
def test_moments_are_not_given_to_another_optimizer(tmp_path, build, why):
    saved(tmp_path / "checkpoints")
    model = Odd()
    with pytest.raises(CheckpointError, match=why):
        Checkpointer(tmp_path / "checkpoints", model=model, optimizer=build(model)).restore()


def test_numbers_are_not_converted_in_silence(tmp_path):
    saved(tmp_path / "checkpoints")
    model = Odd(torch.bfloat16)
    ckpt = Checkpointer(tmp_path / "checkpoints", model=model, optimizer=model.groups("ab", "c"))
    with pytest.raises(CheckpointError, match=r"model/a: is float32 there, torch\.bfloat16 here"):
        ckpt.restore()


def test_a_tensor_that_nothing_can_be_loaded_into_is_refused_at_once(tmp_path):
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
    with pytest.raises(DamagedCheckpoint, match="not a whole index"):
        StoreReader(store, 2)
