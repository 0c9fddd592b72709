"""A loop that cannot resume exactly is refused with the reason and the remedy."""

import sys
from itertools import islice

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hpcrun
from hpcrun.errors import UserError
from tests.support.on_ranks import forked, ranks

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
def test_a_refusal_ends_a_program_in_one_line(tmp_path, capsys):
    state, _, _, loader = parts(tmp_path)
    next(state.batches(loader))
    state.step()
    text = r"step 2 has no batch; iterate state\.batches\(loader\)"
    with pytest.raises(UserError, match=text) as refused:
        state.step()
    with pytest.raises(SystemExit) as ended:
        sys.excepthook(refused.type, refused.value, refused.tb)
    assert ended.value.code == 2
    line = capsys.readouterr().err
    assert line.startswith(f"{__file__}:{refused.tb.tb_lineno}: state.step(): step 2 has no batch;")
    assert line.count("\n") == 1


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
@pytest.mark.parametrize("epochs", [range(2), None])
def test_a_second_pass_in_an_epoch_is_refused(tmp_path, epochs):
    state, _, _, loader = parts(tmp_path)
    next(iter(epochs or state.epochs(2)))
    for _ in state.batches(loader):
        state.step()
    with pytest.raises(UserError, match=r"a second pass over loader in epoch 0; .*state\.epochs"):
        state.batches(loader)


@forked
def test_a_pass_that_the_loop_has_left_is_refused_next(tmp_path):
    state, _, _, loader = parts(tmp_path)
    epochs = state.epochs(2)
    next(epochs)
    for _ in islice(state.batches(loader), 2):
        state.step()
    next(epochs)
    with pytest.raises(UserError, match=r"left the pass .* after 2 batches, .*limit=2\)"):
        state.batches(loader)


@forked
def test_passes_may_end_with_the_shortest_of_them(tmp_path):
    long, short = (DataLoader(TensorDataset(torch.randn(n, 2)), batch_size=2) for n in (8, 4))
    state, *_ = parts(tmp_path, loader=[long, short])
    for epoch in state.epochs(2):
        order = (long, short) if epoch else (short, long)
        for _ in zip(*map(state.batches, order), strict=False):
            state.step()
    assert state.steps == 4


@forked
@pytest.mark.parametrize("given", [True, False])
def test_a_loader_that_is_not_passed_is_refused(tmp_path, given):
    state, *_, loader = parts(tmp_path, **({} if given else {"loader": None}))
    other = DataLoader(TensorDataset(torch.zeros(8)), batch_size=2)
    batches = state.batches(loader) if given else range(4)
    both = zip(other, batches, strict=False)
    next(both)
    state.step()
    next(both)
    with pytest.raises(UserError, match="iterates a DataLoader of a TensorDataset that"):
        state.step()


@forked
def test_a_validation_in_the_first_steps_is_no_unknown_loader(tmp_path):
    state, *_, loader = parts(tmp_path)
    other = DataLoader(TensorDataset(torch.zeros(8)), batch_size=2)
    kept = iter(other)
    for _ in state.epochs(1):
        for _ in state.batches(loader):
            next(kept)
            list(other)
            kept = iter(other)
            state.step()
    assert state.steps == 3


@forked
def test_persistent_workers_without_a_generator_are_refused(tmp_path):
    other = DataLoader([1], num_workers=1, persistent_workers=True)
    with pytest.raises(UserError, match=r"of a list with persistent_workers=True: .*generator="):
        parts(tmp_path)
    assert not list(tmp_path.iterdir())
    other.generator = torch.Generator()
    parts(tmp_path)


class Odd:
    """An object with a state that cannot be saved."""

    def state_dict(self):
        return {"value": self}

    def load_state_dict(self, state):
        raise AssertionError(state)


@forked
def test_a_state_that_cannot_be_saved_is_refused_at_once(tmp_path):
    with pytest.raises(hpcrun.CheckpointError, match=r"extra\.ema\.value: a .*Odd cannot be saved"):
        parts(tmp_path / "first", ema=Odd())
    state, *_ = parts(tmp_path / "loop", loader=None)
    with pytest.raises(hpcrun.CheckpointError, match=r"extra\.loop\.kept: .*Odd cannot be saved"):
        state.step(keep=Odd())
    # Each epoch checks it again.
    best = {"loss": 9.9}
    state, *_, loader = parts(tmp_path / "epochs", best=best)
    for epoch in state.epochs(2):
        for number, _ in enumerate(state.batches(loader)):
            if (epoch, number) == (1, 0):
                best["loss"] = len
                with pytest.raises(hpcrun.CheckpointError, match=r"best\.loss: a .*function.*"):
                    state.step()
                return
            state.step()
    raise AssertionError("no second epoch")


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
    with pytest.raises(UserError, match=r"optimizer: a object has no state_dict\(\)"):
        parts(tmp_path, optimizer=object())
    with pytest.raises(UserError, match=r"model\.critic: is a int, not a Module"):
        parts(tmp_path, model={"critic": 3})
    state, *_ = parts(tmp_path / "all")
    with pytest.raises(UserError, match="give it a loader that"):
        state.batches(DataLoader([1]))
    list(state.epochs(0))
    with pytest.raises(UserError, match="a training of this program has ended there"):
        parts(tmp_path / "all")
    state, *_ = parts(tmp_path / "without", loader=None)
    with pytest.raises(UserError, match=r"max_steps=3\): .* has no loader=, .* while state\.steps"):
        next(state.epochs(2, max_steps=3))
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
