"""A Trainer of transformers with ``ExactResume`` ends with the bits of an undisturbed training."""

import signal
from functools import partial

import pytest

from hpcrun import CheckpointError, UserError
from hpcrun.integrations.folder_session import FolderSession
from tests.checkpoint.test_quarantine import flip
from tests.support.on_ranks import gathered, ranks

from . import loops, trainings

pytestmark = pytest.mark.preload("transformers", "hpcrun.integrations.transformers")

EVALUATION = {
    **{"eval_strategy": "epoch", "save_strategy": "steps", "dataloader_persistent_workers": True},
    **{"max_steps": 10, "save_total_limit": 1},
}


@pytest.fixture
def start(attempt):
    """Return a function that trains in a folder."""
    return partial(attempt, trainings.with_trainer)


@ranks(2)
def test_interruptions_change_no_bit(start, tmp_path, rank, capsys):
    whole = start(tmp_path / "whole")
    assert gathered(whole[0]) == [whole[0]] * 2
    # Twice in the second epoch, which has the steps 5 to 8.
    cut = tmp_path / "cut"
    assert start(cut, loops.stop(4, signal.SIGTERM)) == 75
    assert start(cut, loops.stop(6, rank=0)) == 75
    assert (cut / "checkpoint-5").is_dir()
    assert (cut / "checkpoint-7").is_dir()
    # A crash after the save of step 10, and a flipped byte in it.
    assert start(cut, lambda step: 1 // (step != 11)) == 1
    if rank == 0:
        flip(cut / "checkpoint-10" / "model.safetensors")
    capsys.readouterr()
    assert start(cut) == whole
    said = capsys.readouterr().err
    if rank == 0:
        assert "checkpoint-10 is damaged (model.safetensors: its content differs" in said
        assert "resumed after step 7" in said
    # A finished training does not train again.
    assert start(cut, loops.fail) == whole


@ranks(2)
def test_what_cannot_be_exact_is_refused(start, tmp_path):
    for option in ("save_only_model", "ignore_data_skip", "auto_find_batch_size"):
        with pytest.raises(UserError, match=rf"{option}=True\): .*; remove it"):
            start(tmp_path, **{option: True})
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("torch.distributed.is_initialized", lambda: False)
        with pytest.raises(UserError, match=r"WORLD_SIZE=2, but .*use_cpu=True"):
            FolderSession(tmp_path, keep=None, facts={})
    short = {"max_steps": 1, "dataloader_num_workers": 0}
    whole = start(tmp_path, **short)
    with pytest.raises(CheckpointError, match="seed was 42, and is 7 now"):
        start(tmp_path, seed=7, **short)
    again = trainings.trainer(tmp_path / "again", **short)
    assert again.train(resume_from_checkpoint=True).global_step == 1
    assert loops.digest(again.model) == whole[0]
    with pytest.raises(UserError, match="has ended there"):
        again.train()
    old = tmp_path / "old" / "checkpoint-3"
    old.mkdir(parents=True, exist_ok=True)
    (old / "model.safetensors").touch()
    with pytest.raises(UserError, match="checkpoint-3: is a checkpoint of another program"):
        trainings.trainer(tmp_path / "old", **short).train(resume_from_checkpoint=True)


@pytest.mark.slow
@ranks(2)
def test_evaluations_at_the_end_of_an_epoch_are_not_lost(start, tmp_path, rank):
    whole = start(tmp_path / "whole", **EVALUATION)
    assert [line["step"] for line in whole[2] if "eval_loss" in line] == [4, 8, 10]
    cut = tmp_path / "cut"
    # Step 4 is the last of the first epoch.
    assert start(cut, loops.stop(3), **EVALUATION) == 75
    assert start(cut, loops.stop(5), **EVALUATION) == 75
    assert {path.name for path in cut.glob("checkpoint-*")} == {"checkpoint-5", "checkpoint-6"}
    assert start(cut, **EVALUATION) == whole
    # Step 10 is in the middle of the third epoch.
    assert start(cut, loops.fail, **EVALUATION) == whole
