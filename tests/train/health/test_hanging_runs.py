"""Whole runs of two ranks in which a rank hangs, or only seems to."""

import ctypes
import re
import signal
import time
from pathlib import Path

import pytest
import torch

from hpcrun import exit_codes, get_rank
from hpcrun.job.finalize import finalize
from hpcrun.job.policy import Budgets
from hpcrun.run.attempt import Attempt
from hpcrun.run.endings import stacks_path
from hpcrun.run.journal.events import Cause
from tests.support.on_ranks import forked
from tests.support.training.faulty_tasks import Regression
from tests.support.training.runs import DONE, FAILED, play_run


class HangsOnRank1(Regression):
    """A task that hangs at the fourth call: asleep, or in C code that holds the interpreter's lock."""

    def mishap(self):
        if self.calls == 4 and get_rank() == 1:
            if self.config.model.own.get("holds_lock"):
                # Long enough for the watchdog to see that the first step is over.
                time.sleep(1.0)
                ctypes.PyDLL(None).sleep(600)
            time.sleep(600)


@pytest.mark.parametrize(
    ("holds_lock", "code", "told"),
    [
        (
            "false",
            exit_codes.FAILED,
            rf"rank 1 on \S+ is behind, training at {Path(__file__).name}:\d+ in mishap",
        ),
        # No thread of this process can end it; the watchdog process does.
        ("true", -signal.SIGKILL, r"rank 1 on \S+ does not answer"),
    ],
)
@forked
def test_a_hanging_rank_is_named_and_the_run_restarts(tmp_path, holds_lock, code, told):
    hang = ("train.hang_after=5", f"model.holds_lock={holds_lock}")
    played = play_run(tmp_path, HangsOnRank1, *hang)
    assert played.codes == [[exit_codes.FAILED, code]], played.said()
    folder = played.run.attempt_logs(Attempt("run", 0))
    assert "in mishap" in stacks_path(folder, 1).read_text()
    assert "in training_step" in stacks_path(folder, 0).read_text()
    assert (folder / "flight-gloo-rank-0").stat().st_size
    classification = finalize(played.run, Attempt("run", 0), exit_codes.FAILED, Budgets())
    assert (classification.cause, classification.decision.restart) == (Cause.HANG, True)
    assert re.search(f"no progress for 5 s in step 2: {told}$", classification.line), (
        classification.line
    )


class FailsWhileAPeerIsBlind(Regression):
    """A task that fails on rank 1, while rank 0 waits as for a GPU: without noticing that rank 1 has gone."""

    def mishap(self):
        if self.calls == 4:
            if get_rank() == 1:
                raise ValueError("a failure of rank 1")
            time.sleep(600)


@forked
def test_a_rank_waiting_for_a_failed_rank_ends_soon(tmp_path):
    played = play_run(tmp_path, FailsWhileAPeerIsBlind, "train.hang_after=12")
    assert played.codes == FAILED, played.said()
    assert "rank 0 waits for a rank that has failed; it ends" in played.said()
    assert "no progress" not in played.said()
    assert {rank: it.kind for rank, it in played.failures().items()} == {1: "ValueError"}


class RecompilesOnRank1(Regression):
    """A task that compiles something at the fourth call for longer than a step may take."""

    def mishap(self):
        def slowly(graph, _):
            # The first call only loads the compiler.
            time.sleep(8 if self.calls == 4 else 0)
            return graph.forward

        if self.calls in (1, 4) and get_rank() == 1:
            torch.compile(torch.sin, backend=slowly)(torch.ones(self.calls))


@forked
def test_a_recompilation_in_a_later_step_is_no_hang(tmp_path):
    played = play_run(tmp_path, RecompilesOnRank1, "train.hang_after=5", "train.steps=5")
    assert played.codes == DONE, played.said()
    assert "no progress" not in played.said() + played.said(rank=1)
    assert played.seconds > 8
