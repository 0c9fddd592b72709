"""The promise, on the local cluster: a disturbed run ends with the weights of the undisturbed run."""

import os
import signal
from pathlib import Path

import pytest

from hpcrun.run.files import read_json
from tests.support import jobs


def test_three_interruptions_change_no_bit_and_no_sample(tmp_path: Path) -> None:
    calm = jobs.submit_probe(tmp_path, "calm")
    jobs.wait_for_end(calm)
    assert (read_json(calm.result) or {})["state"] == "finished"

    rough = jobs.submit_probe(tmp_path, "rough", model__pause=0.03)
    with jobs.held_at(rough, 7):
        done = jobs.hpcrun("preempt", "rough", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    with jobs.held_at(rough, 19, restart=1):
        os.kill(jobs.job_status(rough).tasks[3], signal.SIGKILL)
    # In place: the job has the same number of requeues.
    with jobs.held_at(rough, 26, restart=1):
        # To one rank only: all ranks must stop at the same step.
        os.kill(jobs.job_status(rough).tasks[2], signal.SIGUSR2)
    jobs.wait_for_end(rough)

    assert (read_json(rough.result) or {})["state"] == "finished"
    assert [event.cause for event in jobs.events(rough, "ended")] == [
        "preemption",
        "crash",
        "preemption",
        "finished",
    ]
    undisturbed_state = jobs.final_state(calm)
    assert any(name.startswith("state.model/") for name in undisturbed_state)
    assert jobs.final_state(rough) == undisturbed_state
    for rank in range(4):
        undisturbed = jobs.samples_by_step(calm, tmp_path, rank, accumulation=2)
        assert sorted(undisturbed) == list(range(40))
        assert jobs.samples_by_step(rough, tmp_path, rank, accumulation=2) == undisturbed


def test_a_killed_rank_ends_the_job_with_the_cause_first(tmp_path: Path) -> None:
    run = jobs.submit_probe(tmp_path, "killed", model__pause=0.05, train__timeout=600)
    with jobs.held_at(run, 3):
        victim = jobs.job_status(run).tasks[3]
        others = [pid for pid in jobs.job_status(run).tasks if pid != victim]
        os.kill(victim, signal.SIGKILL)
    # Within seconds; torch's own timeout is ten minutes.
    jobs.wait_for(lambda: all(map(jobs.has_ended, others)))
    jobs.wait_for_end(run)
    first = jobs.events(run, "ended")[0]
    assert first.cause == "crash"
    assert str(first.reason).startswith("rank 3 on local1 was killed by SIGKILL")
    assert [event.cause for event in jobs.events(run, "ended")] == ["crash", "finished"]


def test_two_crashes_at_one_step_end_the_run(tmp_path: Path) -> None:
    run = jobs.submit_probe(
        tmp_path,
        "crashing",
        model__fault={"rank": 1, "call": 9},
        checkpoint__every=0,
        train__accumulation=1,
        job__gpus=1,
    )
    jobs.wait_for_end(run)
    result = read_json(run.result) or {}
    assert (result["state"], result["cause"]) == ("failed", "crash")
    assert "ValueError: the data of call 9 is broken" in result["reason"]
    assert "2 times at step 7" in result["reason"]
    assert len(jobs.events(run, "opened")) == 2


def test_a_run_with_a_short_limit_finishes_over_several_allocations(
    tmp_path: Path,
) -> None:
    # Half a minute for a start: a busy machine is slow, and three allocations without a step end the run.
    limit = {"job.time": "0:45", "job.signal_lead": 15, "job.gpus": 1}
    run = jobs.submit_probe(tmp_path, "limited", **limit, model__pause=0.05)
    with jobs.held_at(run, 3):
        before = len(jobs.events(run, "ended"))
        jobs.wait_for(lambda: len(jobs.events(run, "ended")) > before)
    jobs.wait_for_end(run)
    causes = [event.cause for event in jobs.events(run, "ended")]
    assert causes[-1] == "finished"
    assert set(causes[:-1]) == {"time-limit"}


@pytest.mark.slow
def test_a_killed_controller_ends_its_ranks_and_the_run_resumes(
    tmp_path: Path,
) -> None:
    run = jobs.submit_probe(tmp_path, "orphaned", model__pause=0.05, checkpoint__every=5)
    with jobs.held_at(run, 12):
        status = jobs.job_status(run)
        os.kill(status.pid, signal.SIGKILL)
    jobs.wait_for(lambda: all(map(jobs.has_ended, status.tasks)))
    told = jobs.hpcrun("status", "orphaned", cwd=tmp_path)
    assert "lost" in told.stdout
    done = jobs.hpcrun("resume", "orphaned", "--detach", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    jobs.wait_for_end(run)
    assert (read_json(run.result) or {})["state"] == "finished"
