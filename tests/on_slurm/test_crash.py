"""A crash ends a job fast, reports its cause first, and uses the budget for crashes."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.support import jobs

from .cluster import PATIENCE

pytestmark = [pytest.mark.slurm, pytest.mark.lifecycle]


def test_a_killed_rank_restarts_in_place_with_the_same_bits(bench, calm):
    run = bench.submit("killed", model__pause=0.03, train__timeout=600)
    with bench.held_at(run, 14):
        (victim,) = bench.pids(run, 1)
        others = list(bench.pids(run, 0))
        assert len(others) == 1
        os.kill(victim, signal.SIGKILL)
    killed = time.time()
    # srun notices and Slurm kills within seconds; torch's own timeout is ten minutes.
    jobs.wait_for(lambda: all(map(jobs.has_ended, others)))
    bench.wait_until(lambda: bench.causes(run) != [], PATIENCE, lambda: bench.story(run))
    assert jobs.events(run, "ended")[0].time - killed < 400
    state = bench.wait_for_end(run)
    first = jobs.events(run, "ended")[0]
    assert first.cause == "crash"
    assert str(first.reason).startswith("rank 1 on node2 was killed by SIGKILL")
    assert first.host == "node2"
    assert bench.causes(run) == ["crash", "finished"]
    assert (state, bench.slurm.restarts(bench.job(run))) == ("COMPLETED", 0)
    assert [event.attempt.in_place for event in jobs.events(run, "opened")] == [0, 1]
    assert jobs.final_state(run) == jobs.final_state(calm)
    log = bench.batch_log(run)
    assert "starts inside the allocation" in log[log.index("hpcrun: crash: rank 1 on node2") :]
    assert "1 crash (1 in place)" in bench.hpcrun("status", "killed").stdout


def test_two_exceptions_at_one_step_end_the_run(bench):
    run = bench.submit(
        "crashing",
        model__fault={"rank": 1, "call": 9},
        checkpoint__every=0,
        train__accumulation=1,
        restarts__in_place=False,
    )
    assert bench.wait_for_end(run) == "FAILED", bench.story(run)
    result = bench.result(run)
    assert (result["state"], result["cause"]) == ("failed", "crash")
    assert result["reason"].startswith("rank 1 on node2: ValueError: the data of call 9 is broken")
    assert "2 times at step 7" in result["reason"]
    assert len(jobs.events(run, "opened")) == 2
    assert bench.slurm.restarts(bench.job(run)) == 1
    told = bench.hpcrun("status", "crashing").stdout
    assert "failed" in told
    assert "failed: ValueError: the data of call 9 is broken" in told
    assert "(rank 1 on node2)" in told
    assert "hpcrun: crash: rank 1 on node2: ValueError: the data of call 9" in bench.batch_log(run)


@pytest.mark.slow
def test_a_killed_batch_step_costs_one_requeue(bench, calm):
    run = bench.submit("beheaded", model__pause=0.05, checkpoint__every=5)
    with bench.held_at(run, 14):
        words = ["hpcrun", "batch", str(run.path)]
        (step,) = (
            pid
            for pid in bench.slurm.processes("node1")
            if Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")[2:5] == words
        )
        os.kill(step, signal.SIGKILL)
        bench.slurm.wait_restarts(bench.job(run), 1)
    assert bench.wait_for_end(run) == "COMPLETED", bench.story(run)
    assert bench.causes(run) == ["node-failure", "finished"], bench.story(run)
    assert jobs.final_state(run) == jobs.final_state(calm)


@pytest.mark.slow
def test_a_run_without_progress_ends_despite_its_other_budgets(bench):
    run = bench.submit(
        "stuck", model__fault={"rank": 1, "call": 9}, checkpoint__every=0, train__accumulation=1,
        **{"restarts.crash": None, "restarts.same_step": None, "restarts.no_progress": 2},
    )  # fmt: skip
    assert bench.wait_for_end(run) == "FAILED", bench.story(run)
    assert "restarts.no_progress" in bench.result(run)["reason"]
    assert bench.causes(run) == ["crash", "crash"]
    assert bench.slurm.restarts(bench.job(run)) == 1


@pytest.mark.slow
def test_a_missing_task_is_reported_once_without_a_restart(bench):
    run = bench.submit("typo", task="probe:Watched", **{"job.sbatch_args": ["--hold"]})
    probe = bench.folder / "probe.py"
    probe.write_text(probe.read_text().replace("class Watched", "class Gone"))
    bench.slurm.run(["scontrol", "release", bench.job(run)])
    assert bench.wait_for_end(run) == "FAILED", bench.story(run)
    assert bench.result(run)["cause"] == "bad-input"
    assert "Watched" in bench.result(run)["reason"]
    assert bench.slurm.restarts(bench.job(run)) == 0
    assert bench.slurm.scontrol_show_job(bench.job(run))["ExitCode"] == "2:0"
