"""Arguments of Checkpointer: early refusals, the lock of the folder, and the restore of all parts."""

import json
import os
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim.swa_utils import AveragedModel

from hpcrun.checkpoint.checkpointer import Checkpointer
from hpcrun.storage.errors import CheckpointError, CheckpointWarning
from hpcrun.storage.retention import Retention
from hpcrun.storage.store import CheckpointStore
from tests.support.training.forks import fork_ranks

ITSELF = []
ITSELF.append(ITSELF)


def parts(**more):
    model = nn.Linear(2, 2)
    return {"model": model, "optimizer": torch.optim.Adam(model.parameters()), **more}


def stranger():
    model = nn.Linear(2, 2)
    return torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(3))], lr=0.1)


@pytest.fixture
def group_of_one():
    """A process group of a single process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(("inner", "where"), [(False, "it"), (True, "its 0")])
@pytest.mark.usefixtures("group_of_one")
def test_a_model_in_fsdp1_is_refused_with_the_replacement(tmp_path, inner, where):
    model = FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu"))
    model = nn.Sequential(model) if inner else model
    optimizer = torch.optim.Adam(model.parameters())
    told = rf"model: {where} is wrapped in FullyShardedDataParallel \(FSDP1\).*fully_shard\(block\) for each"
    with pytest.raises(CheckpointError, match=told):
        Checkpointer(tmp_path / "saved", model=model, optimizer=optimizer)
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ({"every": -1}, "every=-1"),
        ({"every": 2.5}, r"every=2\.5"),
        ({"minutes": 0}, "minutes=0"),
        ({"minutes": float("nan")}, "minutes=nan"),
        ({"host_memory": -1}, "host_memory=-1"),
        ({"optimizer": stranger()}, "of the optimizer, .* is not part of the model"),
        ({"extra": {"seen": {1}}}, r"extra\.seen: a builtins\.set cannot be saved"),
        (
            {"extra": {"big": [1 << 3000]}},
            r"extra\.big\.0: an integer of 3001 bits cannot be saved",
        ),
        ({"extra": {"a": [1, {"b": (len,)}]}}, r"extra\.a\.1\.b\.0: a builtins\.builtin_function"),
        ({"extra": {"a": {1.5j: 0}}}, r"extra\.a: the key 1\.5j is not plain data"),
        ({"extra": {"rows": torch.eye(2).to_sparse()}}, "extra/rows: a sparse"),
        ({"extra": {"itself": ITSELF}}, "contains itself"),
        ({"extra": {"a": {"\0tensor": "model/weight"}}}, "extra/a: the key '.*tensor'"),
        ({"extra": {"o": stranger().state_dict()}}, r"extra\.o: .* pass the optimizer itself"),
    ],
)
def test_invalid_arguments_are_refused_by_the_constructor(tmp_path, words, told):
    with pytest.raises(CheckpointError, match=told):
        Checkpointer(tmp_path / "checkpoints", **parts() | words)
    assert not (tmp_path / "checkpoints").exists()


def test_a_state_that_becomes_unsavable_does_not_end_training(tmp_path):
    ckpt = Checkpointer(tmp_path, **parts(), every=1)
    ckpt.extra["best"] = np.float32(1)
    assert ckpt.maybe_save(1)
    while ckpt.saving:
        time.sleep(0.01)
    with pytest.warns(CheckpointWarning, match=r"step 1 was not saved: .*best: a numpy\.float32"):
        ckpt.maybe_save(1)
    ckpt.extra["best"] = 1.0
    assert ckpt.maybe_save(2)
    assert ckpt.wait().ok


def averaged(folder, until):
    """Pass a model's companions in three ways, trained up to that step."""
    torch.manual_seed(0)
    given = parts()
    model, head = given["model"], nn.Linear(2, 1)
    averages = AveragedModel(model), AveragedModel(model)
    second = torch.optim.Adam(head.parameters())
    seen = {"losses": [torch.zeros(2)], "count": 0}
    extra = {
        "whole": averages[0], "live": averages[1].state_dict(), "head": [head, second], "seen": seen,
    }  # fmt: skip
    with Checkpointer(folder, **given, extra=extra, every=1) as ckpt:
        for step in range(ckpt.restore(), until):
            for optimizer in (given["optimizer"], second):
                optimizer.zero_grad()
            x = torch.full((1, 2), step + 1.0)
            head(model(x)).sum().backward()
            for optimizer in (given["optimizer"], second):
                optimizer.step()
            for average in averages:
                average.update_parameters(model)
            seen["losses"][0] += model.weight.detach()[0]
            seen["count"] += 1
            ckpt.maybe_save(step + 1)
    return [
        *averages[0].state_dict().values(), *averages[1].state_dict().values(), *head.parameters(),
        *seen["losses"], torch.tensor(seen["count"]),
    ]  # fmt: skip


def test_all_parts_are_restored_at_every_restart(tmp_path):
    calm = averaged(tmp_path / "calm", 6)
    for until in (2, 4, 6):
        rough = averaged(tmp_path / "rough", until)
    assert len(rough) == len(calm)
    assert all(torch.equal(one, other) for one, other in zip(rough, calm, strict=True))


def test_a_value_that_cannot_be_filled_in_place_is_noted(tmp_path):
    extra = {"history": torch.zeros(1), "gone": 1}
    with Checkpointer(tmp_path, **parts(), extra=extra) as ckpt:
        extra["history"] = torch.ones(3)
        ckpt.save(1)
    extra = {"history": torch.zeros(1), "new": nn.Linear(1, 1), "own": 7}
    with Checkpointer(tmp_path, **parts(), extra=extra) as ckpt:
        ckpt.restore()
    assert extra["history"].shape == (3,)
    assert (extra["gone"], extra["own"]) == (1, 7)
    assert [note.split(":")[0] for note in ckpt.notes] == [
        "extra.history",
        "extra.new",
        "extra.own",
    ]
    with (
        Checkpointer(tmp_path, **parts(), extra={"history": nn.Linear(1, 1)}) as ckpt,
        pytest.raises(CheckpointError, match=r"extra\.history: does not accept its state"),
    ):
        ckpt.restore()


def test_the_best_is_kept_and_a_missing_metric_is_reported(tmp_path):
    keep = Retention(keep=1, best=1, metric="-accuracy")
    with Checkpointer(tmp_path, **parts(), retention=keep, every=1) as ckpt:
        for step, accuracy in ((1, 0.75), (2, torch.tensor(0.75)), (3, float("nan")), (4, 0.25)):
            ckpt.maybe_save(step, metric=accuracy)
        ckpt.wait()
        store = CheckpointStore(tmp_path, "reader")
        assert store.steps() == [4, 2]
        assert store.manifest(2).meta == {"step": 2, "accuracy": 0.75}
        with pytest.warns(CheckpointWarning, match=r"needs save\(step, metric"):
            ckpt.save(5)
        ckpt.wait()
        ckpt.save(6, metric=torch.ones(2))  # on one rank only, other ranks would wait for it
        with pytest.raises(CheckpointError, match="step 6 was not saved"):
            ckpt.wait()
        ckpt.save(7, metric=1.0)


def test_only_one_training_at_a_time_saves_to_a_folder(tmp_path):
    folder = tmp_path / "missing" / "checkpoints"
    with Checkpointer(folder, **parts()) as first:
        with pytest.raises(CheckpointError, match=r"saves there \(this process\)"):
            Checkpointer(folder, **parts())

        def play(_):
            with pytest.raises(
                CheckpointError, match=rf"\(process {os.getppid()} on .*\); use anot"
            ):
                Checkpointer(folder, **parts())

        assert fork_ranks(1, play) == [0]
        assert Checkpointer(folder, **parts(), every=0).restore() == 0  # reading needs no lock
        with pytest.raises(CheckpointError, match="another Checkpointer saves there"):
            Checkpointer(folder, **parts(), every=0).save(1)
        first.save(1)
        assert first.wait().ok
    made, anew = Checkpointer(folder, **parts()), Checkpointer(folder, **parts())
    assert [made.restore(), anew.restore()] == [1, 1]
    anew.save(2)
    made.save(3)
    with pytest.raises(CheckpointError, match=r"step 3 was not saved: .*another Checkpointer"):
        made.wait()
    assert anew.wait().ok
    del made, anew
    with Checkpointer(folder, **parts()) as second:
        assert second.restore() == 2


def test_a_restarted_job_takes_the_folder_of_its_killed_start(tmp_path, monkeypatch):
    folder = tmp_path / "checkpoints"
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    ckpt = Checkpointer(folder, **parts())
    lock = json.loads((folder / ".lock").read_text()) | {"space": "other-node-1-2", "host": "node2"}
    (folder / ".lock").write_text(json.dumps(lock))
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    with Checkpointer(folder, **parts()) as again:
        # A process of the killed start that still runs must not save.
        ckpt.save(1)
        with pytest.raises(
            CheckpointError, match=r"step 1 was not saved: .*saves there \(this pro"
        ):
            ckpt.wait()
        again.save(1)
        assert again.wait().ok
    assert not (folder / ".lock").exists()
