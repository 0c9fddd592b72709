"""``accumulation_steps``: several calls of ``training_step`` make one optimizer step, also over a resume."""

import pytest
import torch

from hpcrun import AMPConfig, AMPTrainer, DistributedAMPTrainer, MicroBatches, UserError
from tests.support.on_ranks import agreed, ranks
from tests.support.training.parallelism import Net, adamw, flat
from tests.support.training.small_training import loss

CALLS = 4


def batches(rank, count):
    generator = torch.Generator().manual_seed(10 + rank)
    for _ in range(count):
        inputs = torch.randn(8, 6, generator=generator)
        yield inputs, inputs.sin().sum(1)


def make(parallel="ddp", calls=CALLS, amp=None, **options):
    torch.manual_seed(0)
    made = DistributedAMPTrainer(
        Net(), adamw, device="cpu", parallel=parallel, accumulation_steps=calls, amp=amp, **options
    )
    made.wrap_model()
    return made


def weights(made):
    whole = made.whole_module()
    return None if whole is None else flat(whole)


@pytest.mark.parametrize("amp", [AMPConfig(), AMPConfig(dtype="fp16", init_scale=1024.0)])
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@ranks(2)
def test_four_calls_make_the_step_of_four_micro_batches(rank, tmp_path, parallel, amp):
    by_calls, at_once = make(parallel, amp=amp), make(parallel, calls=1, amp=amp)
    given = list(batches(rank, 2 * CALLS))
    results = [by_calls.training_step(batch, loss) for batch in given]
    assert [result.updated for result in results] == [False, False, False, True] * 2
    assert not any(result.skipped for result in results)
    assert by_calls.steps == 2
    for first in (0, CALLS):
        step = at_once.training_step(MicroBatches(given[first : first + CALLS]), loss)
        calls = results[first : first + CALLS]
        torch.testing.assert_close(step.loss, torch.stack([one.loss for one in calls]).mean())
    one, other = weights(by_calls), weights(at_once)
    assert one is None or torch.equal(one, other)
    if parallel == "fsdp":
        by_calls.training_step(given[0], loss)
        with pytest.raises(UserError, match="FSDP cannot hold the gradients of 1 of 4 calls"):
            by_calls.save_checkpoint(tmp_path)


@pytest.mark.parametrize("saved_at", [2, 7])
@ranks(2, 2)
def test_a_checkpoint_between_calls_keeps_each_rank_s_gradients(rank, tmp_path, phase, saved_at):
    given = list(batches(rank, 3 * CALLS))
    undisturbed, made = make(), make()
    for batch in given:
        undisturbed.training_step(batch, loss)
    if phase == 0:
        for batch in given[:saved_at]:
            made.training_step(batch, loss)
        assert made.save_checkpoint(tmp_path, saved_at).ok
        with pytest.raises(UserError, match=r"a checkpoint file cannot hold .* result\.updated"):
            made.save_checkpoint(tmp_path / "file.pth")
        return
    restored = made.load_checkpoint(tmp_path)
    assert (restored.step, made.steps) == (saved_at, saved_at // CALLS)
    for batch in given[saved_at:]:
        made.training_step(batch, loss)
    assert torch.equal(flat(made.module), flat(undisturbed.module))
    agreed(flat(made.module).tolist())
    # Without the gradients, the accumulation begins again.
    other = make(calls=3)
    (note,) = other.load_checkpoint(tmp_path).notes
    assert note.startswith(f"the gradients of the last {saved_at % CALLS} calls are dropped")
    assert [other.training_step(batch, loss).updated for batch in given[:3]] == [False, False, True]


def test_weights_and_errors_between_calls(capsys):
    made = AMPTrainer(Net(), adamw, device="cpu", accumulation_steps=2)
    (batch,) = batches(0, 1)
    with pytest.raises(ValueError, match="weights need the micro-batches of an optimizer step in"):
        made.training_step(batch, loss, weights=[1.0])
    made.training_step(batch, loss)
    with pytest.raises(TypeError):
        made.training_step(batch, lambda model: model)
    # The failed call may have left a part of its gradients.
    assert "hpcrun:" not in capsys.readouterr().err
    assert [made.training_step(batch, loss).updated for _ in range(2)] == [False, True]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("hpcrun: training_step: call 2 of 2 has raised an exception")
    # No earlier call, no line.
    with pytest.raises(TypeError):
        made.training_step(batch, lambda model: model)
    assert not made.training_step(batch, loss).updated
    assert "hpcrun:" not in capsys.readouterr().err
