"""A loop that cannot resume exactly is refused with the reason and the remedy."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hpcrun
from hpcrun.errors import UserError
from tests.on_ranks import forked, ranks

from . import loops


def parts(folder, **others):
    """Return a state with all parts, and the parts."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    loader = DataLoader(TensorDataset(torch.randn(6, 2)), batch_size=2)
    given = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "loader": loader,
    } | others
    return hpcrun.resumable(folder=folder, **given), optimizer, scheduler, loader


@forked
def test_a_step_without_a_batch_of_the_loader_is_refused(tmp_path):
    state, _, _, loader = parts(tmp_path)
    next(state.batches(loader))
    state.step()
    with pytest.raises(UserError, match=r"step 2 has no batch; iterate state\.batches\(loader\)"):
        state.step()


@forked
@pytest.mark.parametrize("late", ["optimizer", "scheduler"])
def test_a_change_after_the_step_is_refused(tmp_path, late):
    state, optimizer, scheduler, loader = parts(tmp_path)
    batches = state.batches(loader)
    next(batches)
    state.step()
    {"optimizer": optimizer, "scheduler": scheduler}[late].step()
    name = {"optimizer": "SGD", "scheduler": "scheduler"}[late]
    with pytest.raises(UserError, match=rf"{name}\.step\(\) was called after it"):
        next(batches)


@forked
def test_a_second_pass_in_an_epoch_is_refused(tmp_path):
    state, _, _, loader = parts(tmp_path)
    next(state.epochs(2))
    for _ in state.batches(loader):
        state.step()
    with pytest.raises(UserError, match="a second pass over loader in epoch 0"):
        state.batches(loader)


@forked
def test_a_second_training_into_the_same_folder_is_refused(tmp_path):
    state, *_ = parts(tmp_path)
    list(state.epochs(0))
    with pytest.raises(UserError, match="a training of this program has ended there"):
        parts(tmp_path)


@forked
def test_a_scheduler_may_step_after_an_epoch(tmp_path):
    state, _, scheduler, loader = parts(tmp_path)
    for _ in state.epochs(2):
        for _ in state.batches(loader):
            state.step()
        scheduler.step()
    assert state.steps == 6


@forked
def test_unknown_and_missing_objects_are_refused(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="optimizer: is missing"):
        parts(tmp_path, optimizer=[])
    with pytest.raises(UserError, match=r"model\.critic: is a int, not a Module"):
        parts(tmp_path, model={"critic": 3})
    state, *_ = parts(tmp_path)
    with pytest.raises(UserError, match="give it a loader that"):
        state.batches(DataLoader([1]))
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(UserError, match=r"WORLD_SIZE=4, but .* is not initialized"):
        parts(tmp_path / "other")


@ranks(2, 1)
def test_another_number_of_ranks_is_refused(tmp_path, phase):
    if phase == 0:
        with pytest.raises(SystemExit):
            loops.classic(tmp_path, loops.stop(2), workers=0)
    else:
        with pytest.raises(hpcrun.CheckpointError, match="start as many ranks as have saved it"):
            loops.classic(tmp_path, workers=0)
