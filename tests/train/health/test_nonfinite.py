"""The policies for a step that is not finite, in one process."""

import numpy as np
import pytest
import torch
from torch import nn

from hpcrun.config import AMPConfig, override_layer, resolve
from hpcrun.ranks.collective import Ranks
from hpcrun.run.attempt import Attempt
from hpcrun.run.directory import RunDirectory
from hpcrun.run.endings import node_name
from hpcrun.train.data.batching import Batching, samples
from hpcrun.train.data.micro_batches import MicroBatches
from hpcrun.train.health.nonfinite import REPORTS, NonFiniteWatch, NotFinite, samples_of
from hpcrun.train.step.gate import StepGate
from hpcrun.train.step.trainer import AMPTrainer
from tests.support.journal import read_events

ATTEMPT = Attempt("7", 0)
DATA = torch.utils.data.TensorDataset(torch.arange(10.0))


class Training:
    """A trainer and its watch over a run directory, as in the loop."""

    def __init__(self, folder, *overrides, amp=None, start=0, samples=True):
        self.run = RunDirectory(folder)
        config = resolve([override_layer(["train.batch_size=4", *overrides])])
        torch.manual_seed(0)
        self.trainer = AMPTrainer(
            nn.Linear(2, 1),
            lambda model: torch.optim.AdamW(model.parameters(), fused=True),
            amp=amp,
            device="cpu",
        )
        self.options = {"start": start, "ranks": Ranks()}
        self.samples = samples_of(DATA, Batching(4, 1, 2), seed=3) if samples else None
        self.config = config

    def watch(self):
        return NonFiniteWatch(
            self.run, ATTEMPT, self.config, self.trainer, samples=self.samples, **self.options
        )

    def go(self, pattern):
        """Take a step per letter: ``.`` a good step, ``x`` a NaN loss, ``o`` an overflow."""
        watch = self.watch()

        def loss(model, batch):
            value = model(batch).mean()
            if letter == "o":
                value.register_hook(lambda gradient: gradient * torch.inf)
            return value

        for letter in pattern:
            factor = torch.nan if letter == "x" else 1.0
            watch.check(self.trainer.training_step(torch.ones(3, 2) * factor, loss))
        watch.finish()

    def reports(self):
        return [event.step for event in read_events(self.run)]


def test_the_first_consecutive_bad_step_is_recorded(tmp_path, capsys):
    training = Training(tmp_path, start=20)
    training.go("..xxx..x.")
    first, second = read_events(training.run)
    taken = samples(np.arange(22 * 4, 23 * 4), len(DATA), seed=3).tolist()
    facts = {"in_a_row": 1, "ranks": [0], "samples": [taken[:2], taken[2:]]}
    assert (first.tag, first.step, first.own) == ("nonfinite", 22, facts)
    assert second.step == 27
    assert capsys.readouterr().err.count(": gradients are not finite") == 2


def test_an_attempt_records_a_limited_number_of_bad_steps(tmp_path):
    training = Training(tmp_path)
    training.go("x." * (REPORTS + 5))
    assert len(training.reports()) == REPORTS


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    ("overrides", "pattern", "step", "said"),
    [
        (["train.nonfinite_limit=1"], "...x", 3, "at step 3 (train.nonfinite_limit)"),
        (
            ["train.nonfinite_limit=3"],
            "xx.xx.xxx",
            8,
            "at step 8, 3 consecutive steps (train.nonfinite_limit)",
        ),
    ],
)
def test_training_stops_as_the_policy_says(
    tmp_path, monkeypatch, late, overrides, pattern, step, said
):
    if late:
        monkeypatch.setattr(StepGate, "late_on", frozenset({"cpu"}))
    training = Training(tmp_path, *overrides)
    with pytest.raises(NotFinite) as stop:
        training.go(pattern)
    assert said in str(stop.value)
    assert "the loss of rank 0 on" in str(stop.value)
    assert training.reports()[-1] == step
    weights = torch.cat([value.flatten() for value in training.trainer.module.parameters()])
    assert weights.isfinite().all()


def test_consecutive_bad_steps_are_counted_over_a_restart(tmp_path):
    first = Training(tmp_path, "train.nonfinite_limit=3")
    first.go(".xx")
    first.trainer.save_checkpoint(tmp_path / "checkpoints", 3)
    again = Training(tmp_path, "train.nonfinite_limit=3", start=3)
    again.trainer.load_checkpoint(tmp_path / "checkpoints")
    with pytest.raises(NotFinite, match="at step 3, 3 consecutive steps"):
        again.go("x")


def test_overflows_of_a_dynamic_scale_are_reported_beyond_the_limit(tmp_path, capsys):
    limited = ["amp.dtype=fp16", "train.nonfinite_limit=4"]
    training = Training(tmp_path, *limited, amp=AMPConfig(dtype="fp16"))
    training.go("ooo.ooo.")
    assert (training.reports(), capsys.readouterr().err) == ([], "")
    with pytest.raises(NotFinite, match=r"4 consecutive steps \(train.nonfinite_limit\)"):
        training.go("oooo")
    assert len(training.reports()) == 1


@pytest.mark.parametrize("late", [False, True])
def test_a_nan_loss_is_not_an_overflow(tmp_path, monkeypatch, late):
    if late:
        monkeypatch.setattr(StepGate, "late_on", frozenset({"cpu"}))
    amp = AMPConfig(dtype="fp16")
    training = Training(tmp_path, "amp.dtype=fp16", amp=amp)
    training.go(".ooxxo.ox.")
    assert training.reports() == [3, 8]


def test_a_fixed_scale_that_overflows_obeys_the_policy(tmp_path):
    amp = AMPConfig(dtype="fp16", init_scale=256.0, dynamic=False)
    fixed = ["train.nonfinite_limit=1", "amp.dtype=fp16", "amp.dynamic=false"]
    training = Training(tmp_path, *fixed, amp=amp)
    with pytest.raises(NotFinite, match=r"at step 1 \(train.nonfinite_limit\)"):
        training.go(".o")
    assert training.trainer.scaler.get_scale() == amp.init_scale


@pytest.mark.parametrize("weight", [torch.nan, torch.inf, -1.0])
def test_an_invalid_weight_is_named_and_changes_nothing(tmp_path, capsys, weight):
    training = Training(tmp_path, "train.nonfinite_limit=1")
    watch = training.watch()
    before = [value.clone() for value in training.trainer.module.parameters()]
    parts = MicroBatches([torch.ones(3, 2), torch.ones(1, 2)])
    weights = [torch.tensor(3.0), torch.tensor(weight)]
    result = training.trainer.training_step(parts, lambda model, part: model(part).mean(), weights)
    with pytest.raises(NotFinite) as stopped:
        watch.check(result)
    said = f"the task's weight of micro-batch 1 of rank 0 on {node_name()} is {weight:g}; check"
    assert said in str(stopped.value)
    assert "train.lr" not in str(stopped.value)
    for old, new in zip(before, training.trainer.module.parameters(), strict=True):
        assert torch.equal(old, new)
