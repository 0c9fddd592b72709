"""After scancel, the run saves, stops, is not restarted, and can be resumed."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.support import jobs

from . import cluster
from .cluster import PATIENCE
from .training import Bench

pytestmark = [pytest.mark.slurm, pytest.mark.lifecycle]


@pytest.mark.parametrize("by", ["hpcrun", "scancel"])
def test_a_canceled_run_resumes_to_the_same_bits(bench, calm, by):
    run = bench.submit("halted", model__pause=0.05)
    with bench.held_at(run, 13):
        job = bench.job(run)
        if by == "scancel":
            # Slurm signals only the shell of the batch script: the run continues.
            bench.slurm.run(["scancel", "--batch", "--signal=TERM", job])
    with bench.held_at(run, 18):
        if by == "scancel":
            bench.slurm.run(["scancel", job])
        else:
            told = bench.hpcrun("cancel", "halted").stdout
            assert "halted is cancelled at step" in told
    assert bench.wait_for_end(run) == "CANCELLED", bench.story(run)
    (stopped,) = jobs.events(run, "stopped")
    assert stopped.committed
    assert (stopped.step or 0) >= 18
    assert bench.causes(run) == ["cancelled"]
    assert bench.result(run)["step"] == stopped.step
    assert "cancelled" in bench.hpcrun("status", "halted").stdout
    bench.hpcrun("resume", "halted")
    assert bench.wait_for_end(run) == "COMPLETED", bench.story(run)
    assert [event.step for event in jobs.events(run, "started")] == [0, stopped.step]
    assert jobs.final_state(run) == jobs.final_state(calm)
    assert bench.slurm.restarts(job) == 0


@pytest.fixture(scope="module")
def patient(slurm) -> Iterator[cluster.SlurmCluster]:
    """A cluster with enough time for a batch step to classify its end, also on a busy machine."""
    name = f"pytest-{os.getpid()}-patient"
    try:
        yield cluster.start(name, nodes=2, settings=(("KillWait", "120"),))
    finally:
        cluster.stop(name)


@pytest.mark.parametrize("stage", ["setup", "container"])
def test_a_job_canceled_before_its_ranks_start_stays_canceled(patient, stage):
    bench = Bench(patient)
    begun = bench.folder / "begun"
    wrapper = bench.folder / "slow"
    wrapper.write_text(f'#!/bin/bash\ntouch {begun}\nsleep 100\nexec "$@"\n')
    wrapper.chmod(0o755)
    slow = {"setup": {"job.setup": [f"touch {begun}", "sleep 100"]}}
    late = slow.get(stage, {"job.container": [str(wrapper)]})
    run = bench.submit("early", **late)
    job = bench.job(run)
    bench.wait_until(begun.exists, PATIENCE, lambda: bench.story(run))
    patient.run(["scancel", job])
    assert bench.wait_for_end(run) == "CANCELLED", bench.story(run)
    assert bench.causes(run) == ["cancelled"], bench.story(run)
    assert patient.restarts(job) == 0
    assert bench.result(run)["state"] == "cancelled"


def test_a_job_canceled_during_a_restart_stays_canceled(patient):
    """The run has worked before, so a failed set-up would be a reason for a restart."""
    bench = Bench(patient)
    second = bench.folder / "second"
    setup = [f'if [ "${{SLURM_RESTART_COUNT:-0}}" != 0 ]; then touch {second}; sleep 100; fi']
    run = bench.submit("again", model__pause=0.05, **{"job.setup": setup})
    with bench.held_at(run, 3):
        bench.hpcrun("preempt", "again")
    job = bench.job(run)
    bench.wait_until(second.exists, PATIENCE, lambda: bench.story(run))
    patient.run(["scancel", job])
    assert bench.wait_for_end(run) == "CANCELLED", bench.story(run)
    assert bench.causes(run) == ["preemption", "cancelled"], bench.story(run)
    assert patient.restarts(job) == 1


@pytest.mark.slow
def test_a_sigterm_causes_a_requeue_and_the_same_bits(bench, calm):
    run = bench.submit("hit", model__pause=0.1)
    with bench.held_at(run, 13):
        bench.slurm.run(["scancel", "--signal=TERM", bench.job(run)])
    assert bench.wait_for_end(run) == "COMPLETED", bench.story(run)
    assert bench.causes(run) == ["crash", "finished"]
    assert bench.slurm.restarts(bench.job(run)) == 1
    (stopped,) = jobs.events(run, "stopped")
    assert [event.step for event in jobs.events(run, "started")] == [0, stopped.step]
    assert jobs.final_state(run) == jobs.final_state(calm)


def test_a_job_canceled_immediately_does_not_restart(bench):
    run = bench.submit("ended", model__pause=0.1, checkpoint__every=0)
    with bench.held_at(run, 3):
        told = bench.hpcrun("cancel", "--now", "ended").stdout
    assert "killed" in told
    assert "ended is cancelled" in told
    assert not jobs.events(run, "saved")
    assert bench.causes(run) == ["cancelled"]
    assert bench.wait_for_end(run) == "FAILED"
    assert bench.slurm.restarts(bench.job(run)) == 0


def test_a_job_canceled_during_its_preflight_starts_no_rank(bench):
    """The agent of the first start hangs, so the end of its step looks like a silent node."""
    begun, wrapper = bench.folder / "begun", bench.folder / "wrapper"
    wrapper.write_text(
        f'#!/bin/bash\n[ -e {begun} ] || {{ touch {begun}; exec sleep 100; }}\nexec "$@"\n'
    )
    wrapper.chmod(0o755)
    run = bench.submit(
        "checked", **{"job.preflight": "true", "job.container": [str(wrapper)], "job.gpus": 1}
    )
    bench.wait_until(begun.exists, PATIENCE, lambda: bench.story(run))
    assert "killed" in bench.hpcrun("cancel", "--now", "checked").stdout
    bench.wait_for_end(run)
    assert not jobs.events(run, "opened"), bench.story(run)
    assert bench.slurm.restarts(bench.job(run)) == 0
    assert "cancelled" in bench.hpcrun("status", "checked").stdout


def test_a_pending_job_is_canceled_and_never_lost(bench):
    held = {"job.sbatch_args": ["--hold"]}
    bench.submit("ours", **held)
    theirs = bench.submit("theirs", **held)
    # The run of a live job may be in another folder, or deleted.
    lost = bench.hpcrun("cancel", "theirs", "--runs-dir", "elsewhere", check=False)
    assert f"`scancel {bench.job(theirs)}`" in lost.stderr
    assert "is cancelled" in bench.hpcrun("cancel", "ours").stdout
    bench.slurm.run(["scancel", bench.job(theirs)])
    told = bench.hpcrun("status").stdout
    assert told.count("cancelled") == 2
    assert "lost" not in told
    bench.hpcrun("resume", "ours")
    assert "it is held" in bench.hpcrun("status", "ours").stdout
