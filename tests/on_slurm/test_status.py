"""The state of a run comes from squeue, then from sacct, then from the run directory."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from . import cluster
from .conftest import unavailable
from .training import Bench

# Slurm removes ended jobs every half minute.
pytestmark = [pytest.mark.slurm, pytest.mark.slow]


@pytest.fixture
def forgetful(slurm) -> Iterator[cluster.SlurmCluster]:
    """A cluster with accounting and a squeue that forgets a job after two seconds."""
    reason = cluster.why_not(cluster.ClusterSpec(accounting=True))
    if reason is not None:
        unavailable(reason, features=["accounting"])
    name = f"pytest-{os.getpid()}-sacct"
    try:
        yield cluster.start(name, nodes=2, accounting=True, settings=(("MinJobAge", "2"),))
    finally:
        cluster.stop(name)


def test_status_asks_sacct_for_jobs_that_squeue_has_forgotten(forgetful):
    bench = Bench(forgetful)
    held = {"job.sbatch_args": ["--hold"]}
    runs = [bench.submit(name, **held) for name in ("first", "second")]
    jobs = [bench.job(run) for run in runs]
    forgetful.run(["scancel", *jobs])

    def forgotten() -> bool:
        return not forgetful.admin("squeue", "--noheader", "--states=all").strip()

    forgetful.wait_until(forgotten)
    forgetful.wait_until(lambda: len(forgetful.sacct(",".join(jobs))) == 2)
    told = bench.hpcrun("status").stdout
    assert told.count("cancelled") == 2
    assert told.count("cancelled; `hpcrun resume` continues it") == 2
    forgetful.stop_daemon("slurmdbd")
    without = bench.hpcrun("status").stdout
    assert without.count("cancelled") == 2
    assert without.count("its job left Slurm while it waited") == 2
