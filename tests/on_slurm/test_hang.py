"""A rank without progress ends the job, the cause names the rank, and the job restarts."""

from __future__ import annotations

import os
import signal

import pytest

from hpcrun.run.attempt import Attempt
from tests.support import jobs

pytestmark = [
    *(pytest.mark.slurm, pytest.mark.lifecycle, pytest.mark.slow),
    # A stopped process must be the rank itself.
    pytest.mark.usefixtures("fresh_processes"),
]


def test_a_stopped_rank_is_named_and_the_job_restarts_once(bench, calm):
    run = bench.submit("hanging", model__pause=0.03, train__hang_after=5)
    with bench.held_at(run, 14):
        (victim,) = bench.pids(run, 1)
        os.kill(victim, signal.SIGSTOP)
    state = bench.wait_for_end(run)
    first = jobs.events(run, "ended")[0]
    assert (first.cause, first.host) == ("hang", "node2")
    assert str(first.reason).endswith(": rank 1 on node2 does not answer")
    folder = run.attempt_logs(Attempt(bench.job(run), 0))
    assert "in training_step" in (folder / "stacks-rank-00000.txt").read_text()
    assert bench.causes(run) == ["hang", "finished"]
    assert (state, bench.slurm.restarts(bench.job(run))) == ("COMPLETED", 0)
    assert jobs.events(run, "opened")[-1].attempt == Attempt(bench.job(run), 0, 1)
    assert jobs.final_state(run) == jobs.final_state(calm)
