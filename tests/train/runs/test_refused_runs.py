"""Whole runs with bad input: each rank exits with code 2, and rank 0 prints one line."""

import re
from pathlib import Path

import pytest
import torch

from hpcrun import exit_codes, get_rank
from hpcrun.errors import UserError
from hpcrun.job.finalize import finalize
from hpcrun.job.policy import Budgets
from hpcrun.run.attempt import Attempt
from hpcrun.run.journal.events import Cause
from tests.support.on_ranks import forked
from tests.support.training.faulty_tasks import Regression, Validated
from tests.support.training.runs import DONE, REFUSED, play_run


class PrepareRefuses(Regression):
    def prepare(self):
        raise UserError("data.path: there is nothing at /nowhere; download it first")


class Unshardable(Regression):
    def build_model(self):
        model = super().build_model()
        model.scale = torch.nn.Parameter(torch.ones(()))
        return model


@pytest.mark.parametrize(
    ("task", "overrides", "line"),
    [
        (PrepareRefuses, (), "data.path: there is nothing at /nowhere; download it first"),
        (
            Unshardable,
            ("train.parallel=fsdp",),
            "train.parallel: fsdp cannot shard the model: scale has no dimensions; give it",
        ),
        # Started with two ranks, although the config was checked for one.
        (
            Regression,
            ("job.gpus=1", "train.parallel=single"),
            "train.parallel: single, but 2 ranks were started",
        ),
        (
            Regression,
            ("job.gpus=1", "train.batch_size=3", "train.accumulation=2"),
            "train.batch_size: 3 samples are too few for the 2 ranks that were started",
        ),
    ],
)
@forked
def test_bad_input_gives_one_line_and_code_2_everywhere(tmp_path, task, overrides, line):
    played = play_run(tmp_path, task, *overrides)
    assert played.codes == REFUSED, played.said()
    assert played.refusal().startswith(line)
    assert not played.run.result.exists()
    assert not any(played.run.checkpoints.iterdir())


class DatasetMissingOnRank1(Regression):
    def train_dataset(self):
        if get_rank() == 1:
            raise UserError("data.path: there is nothing at /scratch")
        return super().train_dataset()


@forked
def test_an_error_of_rank_1_is_reported_by_rank_0(tmp_path):
    played = play_run(tmp_path, DatasetMissingOnRank1)
    assert played.codes == REFUSED, played.said()
    line = played.refusal()
    assert line.startswith("rank 1 (")
    assert line.endswith("): data.path: there is nothing at /scratch")


class GivesTwo(Regression):
    def loss(self, model, batch):
        return super().loss(model, batch), {"seen": len(batch)}


@forked
def test_an_untrainable_loss_is_reported_once_before_the_first_step(tmp_path):
    played = play_run(tmp_path, GivesTwo)
    assert played.codes == REFUSED, played.said()
    assert "hpcrun: GivesTwo.loss() returned a tuple; return one " in played.said()
    assert played.said(rank=1) == ""


class RefusedKernel(Validated):
    """A model that calls, at ``model.at``, an operation without a deterministic kernel on any device."""

    def prepare(self):
        self.put("prepare")

    def mishap(self):
        if self.calls == 3:
            self.put(f"rank-{get_rank()}")

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        if not model.training:
            self.put("validation")
        elif self.calls == 3:
            loss.register_hook(lambda _: self.put("backward"))
        return loss

    def put(self, at):
        if at == self.config.model.own["at"]:
            torch.zeros(2).put_(torch.tensor([0, 1]), torch.ones(2))


@pytest.mark.parametrize(
    ("at", "overrides"),
    [
        ("prepare", ()),
        ("backward", ("data.workers=1",)),
        ("validation", ("train.steps=2",)),
        ("rank-1", ()),
    ],
)
@forked
def test_a_kernel_refused_by_determinism_is_bad_input(tmp_path, at, overrides):
    played = play_run(tmp_path, RefusedKernel, f"model.at={at}", *overrides)
    # Of two ranks at the kernel, one may be gone before the other has its last gradients.
    (codes,) = played.codes
    assert exit_codes.BAD_INPUT in codes, played.said()
    assert "Traceback" not in played.said() + played.said(rank=1)
    last = played.said(rank=codes.index(exit_codes.BAD_INPUT)).splitlines()[-1]
    line = last.partition("train.deterministic: ")[2]
    assert re.match(
        rf"torch has no deterministic implementation of put_, called at \S+{Path(__file__).name}:",
        line,
    )
    assert "train.deterministic=warn" in line
    classification = finalize(played.run, Attempt("run", 0), max(codes), Budgets())
    assert (classification.cause, classification.decision.restart) == (Cause.BAD_INPUT, False)
    assert classification.line.endswith(line)


@forked
def test_a_kernel_that_torch_only_warns_about_is_used(tmp_path):
    warned = ("model.at=backward", "train.deterministic=warn", "train.steps=3")
    played = play_run(tmp_path, RefusedKernel, *warned)
    assert played.codes == DONE, played.said()
    assert "put_ does not have a deterministic implementation" in played.said()
