"""Ranks that cannot answer SIGTERM after a failure of another rank do not hold the run up."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from tests import jobs

from . import separate_cluster
from .cluster import PATIENCE, SlurmCluster
from .training import Bench

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


@pytest.fixture
def patient() -> Iterator[SlurmCluster]:
    """A cluster that waits much longer than the tests before it sends SIGKILL."""
    yield from separate_cluster.running("deaf", nodes=2, settings=(("KillWait", "3600"),))


def test_a_stopped_rank_does_not_delay_the_restart(patient):
    bench = Bench(patient)
    run = bench.submit("deaf", model__pause=0.03, train__timeout=600, train__hang_after=300)
    with bench.held_at(run, 14):
        # As in a wait for a GPU, no signal but SIGKILL has an effect. Slurm sends SIGCONT before SIGTERM.
        (deaf,), (victim,) = bench.pids(run, 0), bench.pids(run, 1)
        os.kill(deaf, signal.SIGSTOP)
        os.kill(victim, signal.SIGKILL)
        bench.wait_until(lambda: bench.causes(run) != [], PATIENCE, lambda: bench.story(run))
    assert bench.wait_for_end(run) == "COMPLETED", bench.story(run)
    assert bench.causes(run) == ["crash", "finished"]
    assert "rank 1 on node2 was killed by SIGKILL" in jobs.events(run, "ended")[0].fields["reason"]
    assert "hpcrun: kills the ranks that do not answer SIGTERM" in bench.batch_log(run)
