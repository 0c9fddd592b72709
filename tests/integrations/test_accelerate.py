"""A loop with Accelerate and ``exact_resume`` ends with the bits of an undisturbed training."""

import signal
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from hpcrun import UserError
from tests.checkpoint.test_quarantine import flip
from tests.support.on_ranks import gathered, ranks

from . import loops, trainings

pytestmark = pytest.mark.preload("accelerate", "hpcrun.integrations.accelerate")


@pytest.fixture
def start(attempt):
    """Return a function that trains in a folder."""
    return partial(attempt, trainings.with_accelerate)


@ranks(2)
def test_interruptions_change_no_bit(start, tmp_path, rank, capsys):
    whole = start(tmp_path / "whole")
    assert gathered(whole[0]) == [whole[0]] * 2
    cut = tmp_path / "cut"
    # Twice in the second epoch, which has the steps 5 to 8, and at its last step.
    assert start(cut, loops.stop(4, signal.SIGTERM)) == 75
    assert start(cut, loops.stop(6, rank=0)) == 75
    assert start(cut, loops.stop(8), persistent_workers=True) == 75
    # A crash after the save of step 10, and a flipped byte in it.
    assert start(cut, lambda step: 1 // (step != 11), num_workers=0) == 1
    names = {path.name for path in cut.glob("checkpoint-*")}
    assert names == {"checkpoint-7", "checkpoint-9", "checkpoint-10"}
    if rank == 0:
        flip(cut / "checkpoint-10" / "optimizer.bin")
    capsys.readouterr()
    assert start(cut) == whole
    said = capsys.readouterr().err
    if rank == 0:
        assert "checkpoint-10 is damaged (optimizer.bin: its content differs" in said
        assert "resumed after step 9" in said
    # A finished training does not train again.
    assert start(cut, loops.fail) == whole


class Lines(IterableDataset):
    """19 samples."""

    def __iter__(self):
        yield from (dict(trainings.Tokens(19, noisy=True)[index]) for index in range(19))


@ranks(2)
def test_what_cannot_be_exact_is_refused(again, tmp_path):
    from accelerate import Accelerator, DataLoaderConfiguration

    from hpcrun.integrations.accelerate import exact_resume

    def refusal(*parts, config=None, **options):
        again()
        accelerator = Accelerator(cpu=True, dataloader_config=config)
        accelerator.prepare(*parts)
        with pytest.raises(UserError) as refused:
            exact_resume(accelerator, tmp_path / "one", **options)
        return str(refused.value)

    net, lines = nn.Linear(1, 1), DataLoader(Lines(), 2)
    each = DataLoaderConfiguration(dispatch_batches=False)
    assert "no prepared model and loader" in refusal(net)
    assert "set dispatch_batches=False" in refusal(net, lines)
    assert "every=0, keep=3: give at least 1 step" in refusal(net, lines, config=each, every=0)
    assert "keep at least 2 checkpoints" in refusal(net, lines, config=each, keep=1)
    again()
    accelerator = Accelerator(cpu=True, dataloader_config=each)
    _, loader = accelerator.prepare(net, lines)
    state = exact_resume(accelerator, tmp_path / "one")
    with pytest.raises(UserError, match="iterate over state"):
        state.step()
    with pytest.raises(UserError, match="not a loader of accelerator"):
        list(state.batches(lines))
    for _ in state.epochs(9, max_steps=3):
        for batch in state.batches(loader):
            assert len(batch["labels"]) == 2
            state.step()
    with pytest.raises(UserError, match="a second pass over loader0 in epoch 0"):
        list(state.batches(loader))
    assert state.steps == 3
    assert [path.name for path in (tmp_path / "one").glob("checkpoint-*")] == ["checkpoint-3"]
    with pytest.raises(UserError, match="a training of this program has ended there"):
        exact_resume(accelerator, tmp_path / "one")
    with pytest.raises(UserError, match="is exact already"):
        exact_resume(accelerator, tmp_path / "two")


@ranks(2)
def test_ranks_with_different_seeds_share_the_samples(again, tmp_path, rank):
    from accelerate import Accelerator

    from hpcrun.integrations.accelerate import exact_resume

    again()
    accelerator = Accelerator(cpu=True)
    numbers = torch.Generator().manual_seed(rank)
    loader = DataLoader(range(16), 2, shuffle=True, generator=numbers)
    _, loader = accelerator.prepare(nn.Linear(1, 1), loader)
    state = exact_resume(accelerator, tmp_path)
    mine = [int(one) for batch in state.batches(loader) for one in batch]
    assert sorted(one for part in gathered(mine) for one in part) == list(range(16))


class Stopping:
    """A rule to stop that the loop asks in each step."""

    def __init__(self):
        self.patience, self.waited = 50, 0

    def ask(self):
        self.waited += 1
        return self.waited > self.patience

    def state_dict(self):
        return vars(self)

    def load_state_dict(self, state):
        vars(self).update(state)


def carry(folder, *, registered):
    """Train with a rule to stop. An assert in here would hide the variables from hpcrun."""
    from accelerate import Accelerator

    from hpcrun.integrations.accelerate import exact_resume

    accelerator, stopping, net = Accelerator(cpu=True), Stopping(), nn.Linear(2, 1)
    plain = torch.optim.SGD(net.parameters(), lr=0.1)
    rate = torch.optim.lr_scheduler.ExponentialLR(plain, 0.9)
    lines = DataLoader(torch.rand(16, 2), 2, shuffle=True)
    model, optimizer, schedule, loader = accelerator.prepare(net, plain, rate, lines)
    if registered:
        accelerator.register_for_checkpointing(stopping)
    state = exact_resume(accelerator, folder)
    for _ in state.epochs(2):
        for x in state.batches(loader):
            accelerator.backward(model(x).square().mean())
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            stopping.ask()
            state.step()


@ranks(2)
def test_what_a_loop_carries_gets_a_line(again, tmp_path, capfd, rank):
    for registered in (False, True):
        again()
        carry(tmp_path / str(registered), registered=registered)
        said = [line for line in capfd.readouterr().err.splitlines() if "hpcrun:" in line]
        assert len(said) == (not registered and rank == 0), said
        remedy = "accelerator.register_for_checkpointing(stopping), with state_dict()"
        assert all("stopping (a rule to stop" in line and remedy in line for line in said)
