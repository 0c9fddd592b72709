"""Whole runs of two ranks in which a rank fails: the other rank ends too, and the cause is known."""

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import get_worker_info

from hpcrun import exit_codes, get_rank
from hpcrun.checkpoint.sharded import copies
from hpcrun.diagnose.causes import first_cause
from hpcrun.job.finalize import finalize
from hpcrun.job.policy import Budgets
from hpcrun.run.attempt import Attempt
from hpcrun.run.endings import is_cascade
from hpcrun.run.files import read_lines
from hpcrun.train.data.batching import samples
from tests.support.on_ranks import forked
from tests.support.training.faulty_tasks import Noisy, Regression
from tests.support.training.runs import DONE, FAILED, STOPPED_ONCE, play_run


class RaisesOnRank1(Regression):
    def mishap(self):
        if self.calls == 3 and get_rank() == 1:
            raise ValueError("a defect in the loss")


@pytest.mark.parametrize(("parallel", "step"), [("ddp", 1), ("fsdp", 2)])
@forked
def test_a_rank_that_raises_ends_the_others_as_cause(tmp_path, parallel, step):
    played = play_run(tmp_path, RaisesOnRank1, f"train.parallel={parallel}")
    assert played.codes == FAILED, played.said()
    failures = played.failures()
    # The first call of the loss is DDP's bucket warm-up.
    assert (failures[1].kind, failures[1].step) == ("ValueError", step)
    assert is_cascade(failures[0])


@forked
def test_a_rank_killed_in_a_restore_ends_the_others(tmp_path):
    def begin(rank, restart):
        if restart and rank == 1:
            # At the first broadcast of what the ranks have read.
            copies.broadcast = lambda *_: os.kill(os.getpid(), signal.SIGKILL)

    played = play_run(tmp_path, Regression, "model.stop_at=3", begin=begin)
    assert played.codes == [STOPPED_ONCE[0], [exit_codes.FAILED, -signal.SIGKILL]], played.said()
    (failure,) = played.failures(restart=1).values()
    assert is_cascade(failure)
    # The end of the connection shows immediately; a timeout would name none.
    assert "hpcrun: rank 0 lost its peers: " in played.said()
    assert "onnection" in played.said()


class PrepareRaises(Regression):
    def prepare(self):
        raise OSError("the download broke off")


class ModelRaisesOnRank1(Regression):
    def build_model(self):
        if get_rank() == 1:
            raise ValueError("no room for this model")
        return super().build_model()


@pytest.mark.parametrize(
    ("task", "culprit", "kind"),
    [(PrepareRaises, 0, "OSError"), (ModelRaisesOnRank1, 1, "ValueError")],
)
@forked
def test_a_failure_of_one_rank_ends_all_ranks(tmp_path, task, culprit, kind):
    played = play_run(tmp_path, task)
    assert played.codes == FAILED, played.said()
    failures = played.failures()
    assert failures[culprit].kind == kind
    assert failures[1 - culprit].kind == "PeerFailed"
    assert "Traceback" in played.said(rank=culprit)
    assert "Traceback" not in played.said(rank=1 - culprit)


class ExitsWithZero(Regression):
    def mishap(self):
        if self.calls == 3:
            sys.exit(0)


@forked
def test_a_task_that_exits_with_0_is_not_finished(tmp_path):
    played = play_run(tmp_path, ExitsWithZero)
    assert played.codes == FAILED, played.said()
    assert "SystemExit" in played.kinds()
    assert not played.run.result.exists()


class FailsWhileLoadersRead(Regression):
    def mishap(self):
        if self.calls == 3:
            raise ValueError("a defect in the loss")


class FailsWhileALoaderHangs(FailsWhileLoadersRead):
    class Hanging(Noisy):
        def __getitem__(self, index):
            worker = get_worker_info()
            self.read = getattr(self, "read", 0) + 1
            # The loss fails at the second step; a step has four samples, and this is the third, read ahead.
            if worker is not None and self.read > 8:
                time.sleep(600)
            return super().__getitem__(index)

    def train_dataset(self):
        return self.Hanging()


@pytest.mark.parametrize("task", [FailsWhileLoadersRead, FailsWhileALoaderHangs])
@forked(limit=450)
def test_a_failed_rank_ends_despite_deaf_loader_processes(tmp_path, task):
    played = play_run(tmp_path, task, "data.workers=1")
    assert played.codes == FAILED, played.said()
    assert "ValueError" in played.kinds()
    # The hanging loader sleeps for ten minutes.
    assert played.seconds < 400


class NotFiniteOnRank1(Regression):
    """A loss that is NaN on rank 1, at the calls from ``bad_from`` to ``bad_to``."""

    def loss(self, model, batch):
        value = super().loss(model, batch)
        wanted = self.config.model.own
        bad = model.training and wanted["bad_from"] <= self.calls <= wanted["bad_to"]
        return value * float("nan") if bad and get_rank() == 1 else value


@forked
def test_nonfinite_steps_of_one_rank_are_skipped_on_all(
    tmp_path,
):
    played = play_run(tmp_path, NotFiniteOnRank1, "model.bad_from=4", "model.bad_to=5")
    assert played.codes == DONE, played.said()
    (event,) = played.events("nonfinite")
    # The first call of the loss is DDP's bucket warm-up, so the fourth call is of step 2.
    assert (event.step, event.ranks) == (2, [1])
    assert event.samples == [samples(np.arange(20, 24), 24, seed=0).tolist()]
    assert "skipped step 2: gradients are not finite; the loss of rank 1" in played.said()
    assert [line.get("skipped") for line in read_lines(played.run.metrics)] == [None, 2, 2, 2]


@forked
def test_lasting_nonfinite_gradients_end_the_run_with_the_rank(tmp_path):
    played = play_run(
        tmp_path,
        NotFiniteOnRank1,
        *("model.bad_from=4", "model.bad_to=99", "train.nonfinite_limit=2"),
    )
    assert played.codes == FAILED, played.said()
    failures = played.failures()
    assert (failures[1].kind, failures[1].step) == ("NotFinite", 3)
    assert "at step 3, 2 consecutive steps (train.nonfinite_limit)" in failures[1].message
    cause = first_cause(list(failures.values()), [])
    assert (cause.rank, cause.step, cause.cascade) == (1, 3, 1)
    assert [event.step for event in played.events("nonfinite")] == [2, 3]
    # The last record is written right before the end.
    assert [line["step"] for line in read_lines(played.run.metrics)] == [2, 4]


class RunsOutOfMemory(Regression):
    def mishap(self):
        if self.calls == 3 and get_rank() == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore.")


@forked
def test_a_rank_out_of_memory_prints_advice(tmp_path):
    played = play_run(tmp_path, RunsOutOfMemory)
    assert played.codes == FAILED, played.said()
    failure = played.failures()[1]
    assert failure.kind == "OutOfMemory"
    assert Path(__file__).name in failure.where
    assert "a smaller train.micro_batch" in failure.message
    classification = finalize(
        played.run, Attempt("run", 0), exit_codes.FAILED, Budgets(same_step=1)
    )
    assert "rank 1 on" in classification.line
    assert ": out of memory: CUDA out of memory. Tried to allocate 2.00 GiB." in classification.line
    assert not classification.decision.restart
    assert "restarts.same_step" in classification.decision.reason
