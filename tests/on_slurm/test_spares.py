"""Spare nodes: a lost node is replaced by the watch of the batch step, long before Slurm notices the loss."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import pytest

from hpcrun.run.files import read_lines
from hpcrun.run.journal.events import Event
from tests.support import jobs

from . import cluster, separate_cluster, training
from .cluster import PATIENCE

pytestmark = [pytest.mark.slurm, pytest.mark.lifecycle]


@pytest.fixture(scope="module")
def patient() -> Iterator[cluster.SlurmCluster]:
    """A cluster with Slurm's default patience: a node counts as down after five minutes."""
    yield from separate_cluster.running("spares", nodes=3, settings=(("SlurmdTimeout", "300"),))


@pytest.fixture
def spare_bench(patient: cluster.SlurmCluster) -> Iterator[training.Bench]:
    place = training.Bench(patient)
    yield place
    patient.heal()
    place.remove()


def wait_for_event(bench: training.Bench, run, what: str) -> Event:
    bench.wait_until(lambda: bool(jobs.events(run, what)), PATIENCE, lambda: bench.story(run))
    return jobs.events(run, what)[-1]


def wait_for_finish(bench: training.Bench, run) -> None:
    """Wait for the end of the run."""
    bench.wait_until(
        lambda: bench.causes(run)[-1:] == ["finished"], PATIENCE, lambda: bench.story(run)
    )


def seconds_to_next_step(run, lost: float) -> float:
    """Return the time from a loss to the first step of the attempt that follows."""
    return min(line["time"] for line in read_lines(run.metrics) if line.get("in_place") == 1) - lost


def test_a_spare_replaces_a_node_without_power(spare_bench, calm):
    bench = spare_bench
    memory = {"checkpoint__memory_every": 3, "checkpoint__memory_copies": 1}
    run = bench.submit("hit", "--spares", "1", model__pause=0.2, checkpoint__every=0, **memory)
    bench.wait_for_step(run, 12)
    lost = time.time()
    bench.slurm.cut_link("node2")
    bench.slurm.kill_node("node2")
    replaced = wait_for_event(bench, run, "replaced")
    # Slurm itself has noticed nothing.
    assert not bench.slurm.node_state("node2").startswith("down")
    assert (replaced.lost, replaced.by) == ("node2", "node3")
    assert "no heartbeat" in replaced.reason
    wait_for_finish(bench, run)
    # The job has left the lost node, so it ends, and Slurm requeues it not when it notices the loss.
    bench.slurm.wait_state(bench.job(run), "COMPLETED")
    assert bench.slurm.scontrol_show_job(bench.job(run))["NodeList"] == "node[1,3]"
    assert bench.causes(run) == ["node-failure", "finished"]
    assert bench.slurm.restarts(bench.job(run)) == 0
    assert jobs.final_state(run) == jobs.final_state(calm)
    # The files of the lost node were in the memory of the other node.
    assert jobs.events(run, "started")[-1].has("snapshot")
    (noted,) = jobs.events(run, "node-lost")
    print(
        f"lost after {noted.time - lost:.1f} s, replaced after {replaced.time - lost:.1f} s, "
        f"next step after {seconds_to_next_step(run, lost):.1f} s"
    )


def test_a_spare_that_dies_ends_nothing(spare_bench, calm):
    bench = spare_bench
    run = bench.submit("calm", "--spares", "1", model__pause=0.2)
    bench.wait_for_step(run, 5)
    bench.slurm.cut_link("node3")
    bench.slurm.kill_node("node3")
    assert wait_for_event(bench, run, "spare-lost").host == "node3"
    wait_for_finish(bench, run)
    assert bench.causes(run) == ["finished"]
    assert jobs.final_state(run) == jobs.final_state(calm)


SPARE, RANGE = ("--spares", "1"), ("--nodes", "2-3")


@pytest.mark.parametrize(
    ("shape", "first", "step"),
    [
        (SPARE, "orphan_node", 0),
        pytest.param(SPARE, "cut_link", 12, marks=pytest.mark.slow),
        pytest.param(RANGE, "orphan_node", 12, marks=pytest.mark.slow),
        pytest.param(RANGE, "cut_link", 0, marks=pytest.mark.slow),
    ],
)
def test_slurm_requeues_a_job_without_its_batch_host(bench, calm, shape, first, step):
    # A pulled plug cuts the link of all processes; a reboot ends Slurm's daemons before the rest.
    run = bench.submit("hit", *shape, model__pause=0.2, checkpoint__every=5)
    job = bench.job(run)
    bench.slurm.wait_state(job, "RUNNING")
    with bench.held_at(run, step) if step else contextlib.nullcontext():
        host = bench.slurm.scontrol_show_job(job)["BatchHost"]
        getattr(bench.slurm, first)(host)
        bench.slurm.kill_node(host)
        bench.slurm.wait_restarts(job, 1)
    assert bench.wait_for_end(run) == "COMPLETED", bench.story(run)
    assert bench.causes(run)[-1] == "finished"
    if shape == SPARE:
        assert jobs.final_state(run) == jobs.final_state(calm)
