"""The state of a training: the Checkpointer and the trainers save the same content, and load each other's."""

import pytest
import torch
from torch import nn

from hpcrun.checkpoint.checkpointer import Checkpointer
from hpcrun.checkpoint.folder import folder_engine, folder_store
from hpcrun.checkpoint.sharded.rank_file import StoreReader
from hpcrun.checkpoint.state.training import RankPart, TrainingState
from hpcrun.ranks.collective import Ranks
from hpcrun.storage.errors import CheckpointError
from hpcrun.storage.index import INDEX, decode
from hpcrun.storage.store import CheckpointStore
from hpcrun.train.step.amp_trainer import AMPTrainer

TENSORS = {"model/weight", "model/bias", "extra/seen"} | {
    f"optimizer/state/{name}/{moment}"
    for name in ("weight", "bias")
    for moment in ("step", "exp_avg", "exp_avg_sq")
}
SHARED = {"model", "optimizer", "scaler", "scheduler", "extra"}
GENERATORS = {"python", "cpu", "numpy", "accelerators"}


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.1)


def halving(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


def make_trainer(**more):
    return AMPTrainer(nn.Linear(2, 1), adam, scheduler=halving, device="cpu", **more)


def make_parts():
    model = nn.Linear(2, 1)
    optimizer = adam(model)
    return {"model": model, "optimizer": optimizer, "scheduler": halving(optimizer)}


def noisy_loss(model, _=None):
    return model(torch.rand(3, 2)).square().sum()


def train(model, optimizer, scheduler, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        noisy_loss(model).backward()
        optimizer.step()
        scheduler.step()
    return [parameter.tolist() for parameter in model.parameters()]


def keys(folder):
    """Return the names of the tensors, and the keys of the shared data and of rank 0's data."""
    store = CheckpointStore(folder, "reader")
    (step,) = store.steps()
    raw = store.read(step, INDEX)
    reader = StoreReader(store, step, raw)
    assert set(decode(raw).blobs) == {"shared", "own-00000"}
    return set(decode(raw).tensors), set(reader.blob("shared")), set(reader.blob("own-00000"))


def test_the_keys_of_a_trainer_s_checkpoint_do_not_change(tmp_path):
    trainer = make_trainer(ema=0.9)
    trainer.training_step(None, noisy_loss)
    engine = folder_engine(folder_store(tmp_path), Ranks(), pinned=False)
    trainer.start_checkpoint(engine, 1, {"seen": torch.ones(1)}, own={"stream": [3]})
    assert engine.wait()[-1].ok
    averages = {"ema/weight", "ema/bias"}
    own = GENERATORS | {"threads", "stream"}
    assert keys(tmp_path) == (TENSORS | averages, SHARED | {"ema"}, own)


def test_the_keys_of_a_checkpointer_s_checkpoint_do_not_change(tmp_path):
    given = make_parts()
    train(**given, steps=1)
    with Checkpointer(tmp_path, **given, extra={"seen": torch.ones(1)}) as ckpt:
        ckpt.save(1)
    assert keys(tmp_path) == (TENSORS, SHARED, GENERATORS)


def test_a_trainer_and_a_checkpointer_continue_each_other_s_training(tmp_path):
    given = make_parts()
    with Checkpointer(tmp_path / "a", **given, every=0) as ckpt:
        train(**given, steps=2)
        ckpt.save(2)
        ckpt.wait()
        after = train(**given, steps=2)
    trainer = make_trainer()
    restored = trainer.load_checkpoint(tmp_path / "a")
    # A trainer counts its steps with the loss scale; this Checkpointer has no loss scale.
    lacking = "the checkpoint has no state of a scaler; it starts new at this step"
    assert (restored.step, restored.notes) == (2, (lacking,))
    assert trainer.save_checkpoint(tmp_path / "b", 2).ok
    for _ in range(2):
        trainer.training_step(None, noisy_loss)
    assert [parameter.tolist() for parameter in trainer.module.parameters()] == after
    again = make_parts()
    with Checkpointer(tmp_path / "b", **again, every=0) as ckpt:
        assert ckpt.restore() == 2
        unused = "the checkpoint's state of a scaler is not used; this training run has none"
        assert ckpt.notes == (unused,)
        assert train(**again, steps=2) == after


def test_parts_of_a_rank_are_saved_by_name(tmp_path):
    given, restored = make_parts(), []

    def part(saved):
        def restore(found):
            restored.append(found)
            return None if found else "nothing was saved"

        return RankPart(lambda: saved, restore)

    engine = folder_engine(folder_store(tmp_path), Ranks(), pinned=False)
    state = TrainingState(**given, rank_parts={"full": part({"n": 1}), "empty": part(None)})
    shared, own = state.capture({})
    assert own.keys() == GENERATORS | {"full"}
    assert engine.save(1, shared, own, {}, state.alike()).ok
    state = TrainingState(**given, rank_parts={"full": part(0), "new": part(0)})
    assert state.restore(engine.restore(state.template())).notes == ("nothing was saved",)
    assert restored == [{"n": 1}, None]


def test_a_failed_restore_does_not_allow_saves_into_the_folder(tmp_path):
    with Checkpointer(tmp_path, **make_parts()) as ckpt:
        ckpt.save(1)
    model = nn.Linear(3, 1)
    other = Checkpointer(tmp_path, model=model, optimizer=adam(model))
    with pytest.raises(CheckpointError, match="weight"):
        other.restore()
    with pytest.raises(CheckpointError, match="did not restore; call restore"):
        other.save(2)
