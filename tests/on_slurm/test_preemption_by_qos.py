"""Preemption by a job of a higher QOS: PreemptType=preempt/qos, where the QOS has the preemption mode."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import jobs

from .cluster import PATIENCE, Partition, SlurmCluster
from .separate_cluster import running
from .training import Bench

pytestmark = [pytest.mark.slurm, pytest.mark.lifecycle, pytest.mark.slow]

# The cluster's mode cancels a preempted job. Only the job's QOS requeues it.
SETTINGS = (("PreemptType", "preempt/qos"), ("PreemptMode", "CANCEL"))
# Seconds. Slurm checks for the end of a grace time at intervals.
GRACE = 15


@pytest.fixture
def site() -> Iterator[SlurmCluster]:
    """A cluster of two nodes with the QOS ``low``, which ``high`` preempts."""
    options = {"accounting": True, "partitions": (Partition("batch"),), "settings": SETTINGS}
    for site in running("qos", nodes=2, **options):
        for words in (
            ("add", "qos", "low", "preemptmode=requeue", f"gracetime={GRACE}"),
            ("add", "qos", "high", "preempt=low", "priority=100"),
            ("modify", "user", site.user, "set", "qos=normal,low,high"),
        ):
            site.admin("sacctmgr", "--immediate", *words)
        yield site


def test_a_preemption_by_qos_causes_one_requeue(site: SlurmCluster, calm) -> None:
    bench = Bench(site)
    run = bench.submit("moved", model__pause=0.05, job__qos="low")
    with bench.held_at(run, 13):
        assert site.scontrol_show_job(bench.job(run))["QOS"] == "low"
        urgent = site.sbatch(
            *("--qos=high", "-N2", "--exclusive", "--output=/dev/null"), "--wrap", "sleep 1"
        )
        site.wait_state(urgent, timeout=PATIENCE)
    state = bench.wait_for_end(run)
    assert site.state(urgent) == "COMPLETED"
    # A second requeue by hpcrun would show as an extra start after the run's end.
    assert (state, site.restarts(bench.job(run))) == ("COMPLETED", 1), bench.story(run)
    assert bench.causes(run) == ["preemption", "finished"]
    (stopped,) = jobs.events(run, "stopped")
    assert stopped.fields["committed"]
    assert [event.step for event in jobs.events(run, "started")] == [0, stopped.step]
    assert jobs.final_state(run) == jobs.final_state(calm)
