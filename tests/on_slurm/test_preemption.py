"""Every kind of preemption: the run saves, is requeued exactly once, and resumes to the same bits."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.support import jobs

from . import cluster
from .cluster import PATIENCE, Partition
from .training import Bench

pytestmark = [pytest.mark.slurm, pytest.mark.lifecycle]

CANCELLING = (
    Partition("batch", (("PriorityTier", "1"), ("PreemptMode", "CANCEL"))),
    Partition("urgent", (("PriorityTier", "100"), ("PreemptMode", "OFF"))),
)
# Slurm checks for the end of a grace time at intervals, so the effective time is shorter than 15 s.
FLAVOURS = {
    "without-grace": {"grace_s": 0},
    "with-grace": {"grace_s": 15},
    "with-grace-and-signal": {"grace_s": 15, "preempt_user_signal": True},
    # Slurm ends the job finally; hpcrun requeues it.
    "cancelling": {"partitions": CANCELLING},
}


@pytest.fixture(params=FLAVOURS)
def site(request, slurm) -> Iterator[cluster.SlurmCluster]:
    """A cluster of two nodes with one of the kinds of preemption."""
    name = f"pytest-{os.getpid()}-{request.param}"[:31].rstrip("-")
    try:
        yield cluster.start(name, nodes=2, **FLAVOURS[request.param])
    finally:
        cluster.stop(name)


def preempt(site: cluster.SlurmCluster) -> str:
    """Submit an urgent job that needs every node for a short time."""
    return site.sbatch(
        *("-p", "urgent", "-N2", "--exclusive", "--output=/dev/null"), "--wrap", "sleep 1"
    )


def test_a_preemption_causes_one_requeue_and_the_same_bits(site, calm):
    bench = Bench(site)
    run = bench.submit("moved", model__pause=0.05)
    with bench.held_at(run, 13):
        urgent = preempt(site)
        site.wait_state(urgent, timeout=PATIENCE)
    state = bench.wait_for_end(run)
    assert site.state(urgent) == "COMPLETED"
    assert state == "COMPLETED", bench.story(run)
    # On a busy machine Slurm 24.11 may start the job again before the urgent job, and preempt it again.
    restarts = site.restarts(bench.job(run))
    assert restarts >= 1
    assert bench.causes(run) == ["preemption"] * restarts + ["finished"]
    stops = jobs.events(run, "stopped")
    assert all(stopped.committed for stopped in stops)
    begins = [event.step for event in jobs.events(run, "started")]
    assert begins == [0, *(stopped.step for stopped in stops)]
    assert jobs.final_state(run) == jobs.final_state(calm)
    for rank in range(2):
        mine = jobs.samples_by_step(run, bench.folder, rank, accumulation=2)
        theirs = jobs.samples_by_step(calm, calm.path.parents[1], rank, accumulation=2)
        assert mine == theirs


@pytest.mark.slow
def test_a_job_killed_before_its_save_counts_as_preempted(slurm, bench):
    # A step longer than KillWait: no rank reads its flag in time.
    alone = {"train.steps": 1, "train.accumulation": 1, "optim.warmup_steps": 0}
    run = bench.submit("slow", model__pause=25.0, **alone)
    bench.wait_until(lambda: jobs.events(run, "started") != [], PATIENCE, lambda: bench.story(run))
    slurm.sbatch("-p", "urgent", "-N4", "--exclusive", "--output=/dev/null", "--wrap", "sleep 1")
    assert bench.wait_for_end(run) == "COMPLETED", bench.story(run)
    assert bench.causes(run) == ["preemption", "finished"]
    assert slurm.restarts(bench.job(run)) == 1
