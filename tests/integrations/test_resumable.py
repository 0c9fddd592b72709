"""A loop with ``hpcrun.resumable`` ends with the bits of an undisturbed run, whatever interrupts it."""

import signal

import pytest
import torch

import hpcrun
from hpcrun.errors import UserError
from hpcrun.train.own_loop.session import ENDED
from tests.support.on_ranks import ranks

from . import loops


def interrupted_twice(train, folder, phase, steps, **options):
    """In phase 0 and 1, stop after ``steps[phase]``; in phase 2, compare the end with an undisturbed run."""
    number = (signal.SIGUSR1, signal.SIGTERM)
    if phase < 2:
        at = loops.stop(steps[phase], number[phase], rank=1 - phase)
        with pytest.raises(SystemExit) as ended:
            train(folder / "cut", at, **options)
        assert ended.value.code == 75
        # A rank learns of the signal one step later.
        assert (folder / "cut" / f"step-{steps[phase] + 1:09d}").is_dir()
        return
    assert train(folder / "cut", **options) == train(folder / "whole", **options)


@ranks(2, 2, 2)
@pytest.mark.parametrize("workers", [0, 2])
def test_two_stops_in_one_epoch_change_no_bit(tmp_path, phase, workers):
    interrupted_twice(loops.classic, tmp_path, phase, (6, 8), workers=workers)


@ranks(1, 1)
def test_a_finished_training_continues_with_more_epochs(tmp_path, phase):
    options = {"wrap": "plain", "workers": 0, "every": 4}  # the end is between two saves
    if phase:  # A finished training does not train again.
        loops.classic(tmp_path / "more", loops.fail, epochs=2, **options)
        ENDED.clear()
    more = loops.classic(tmp_path / "more", epochs=2 + phase, **options)
    assert not phase or more == loops.classic(tmp_path / "whole", epochs=3, **options)


@ranks(2, 2, 2)
def test_two_loaders_in_turn_resume_with_the_same_bits(tmp_path, phase):
    # Before the first stop, both loaders have ended their first pass.
    interrupted_twice(loops.in_turn, tmp_path, phase, (8, 11))


@ranks(2, 2, 2)
def test_a_sharded_model_resumes_with_the_same_bits(tmp_path, phase):
    interrupted_twice(loops.classic, tmp_path, phase, (6, 8), workers=0, wrap="fsdp")


@ranks(2, 2, 2)
def test_a_gan_with_two_optimizers_resumes_with_the_same_bits(tmp_path, phase):
    interrupted_twice(loops.gan, tmp_path, phase, (7, 9))


@ranks(2, 2, 2)
@pytest.mark.parametrize("data", [loops.Lines, loops.SavedLines])
def test_an_iterable_dataset_resumes_with_the_same_bits(tmp_path, phase, data):
    interrupted_twice(loops.stream, tmp_path, phase, (8, 11), data=data)


@ranks(3, 3, 3)
def test_three_ranks_add_gradients_in_the_same_order(tmp_path, phase):
    interrupted_twice(loops.wide, tmp_path, phase, (3, 5))


@ranks(2, 2, 2)
def test_a_loop_without_a_loader_resumes_with_the_same_bits(tmp_path, phase):
    interrupted_twice(loops.tokens, tmp_path, phase, (4, 8))


@ranks(2, 2, 2)
def test_limited_passes_with_another_optimizer_resume_with_the_same_bits(tmp_path, phase):
    # The first stop is at the end of a pass.
    interrupted_twice(loops.limited, tmp_path, phase, (2, 4))


@ranks(1, 1, 1)
def test_epochs_without_a_loader_resume_with_the_same_bits(tmp_path, phase):
    # The first stop is after the last step of an epoch: its validation follows the save.
    at = loops.nothing if phase == 2 else loops.stop((8, 10)[phase], signal.SIGTERM, rank=0)
    if phase < 2:
        with pytest.raises(SystemExit):
            loops.epochs(tmp_path / "cut", at)
    else:
        assert loops.epochs(tmp_path / "cut") == loops.epochs(tmp_path / "whole")


@ranks(1, 1)
def test_a_place_that_no_loop_asks_for_is_refused(tmp_path, phase):
    model = torch.nn.Linear(1, 1)
    state = hpcrun.resumable(model=model, folder=tmp_path, every=1)
    for _ in state.epochs(2):
        if phase:
            with pytest.raises(UserError, match=r"after 2 steps of epoch 0, .*range\(state\.pos"):
                state.step()
            return
        for _ in range(3):
            if state.steps == 2:
                state.close()
                return
            state.step()
