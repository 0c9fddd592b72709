"""Ranks that cannot answer SIGTERM after a failure of another rank do not hold the run up."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from tests.support import jobs

from . import separate_cluster
from .cluster import PATIENCE, SlurmCluster
from .training import Bench

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

DEAF = '''

class Deaf(Probe):
    """Rank 0 takes the file `deaf` away and sleeps: as a wait for a GPU, this sees no broken connection."""

    def note(self, indices):
        super().note(indices)
        if os.environ["RANK"] == "0":
            try:
                os.unlink(os.path.join(self.config.data.own["log"], "deaf"))
            except FileNotFoundError:
                return
            time.sleep(36000)
'''


@pytest.fixture
def patient() -> Iterator[SlurmCluster]:
    """A cluster that waits much longer than the tests before it sends SIGKILL."""
    yield from separate_cluster.running("deaf", nodes=2, settings=(("KillWait", "3600"),))


def test_a_deaf_rank_does_not_delay_the_restart(patient):
    bench = Bench(patient)
    probe = bench.folder / "probe.py"
    probe.write_text(probe.read_text() + DEAF)
    deaf = bench.folder / "deaf"
    run = bench.submit(
        "deaf", task="probe:Deaf", model__pause=0.3, train__timeout=7200, train__hang_after=3000
    )
    bench.wait_for_step(run, 14)
    deaf.write_text("")
    patient.wait_until(lambda: not deaf.exists(), PATIENCE, lambda: bench.story(run))
    (victim,) = bench.pids(run, 1)
    os.kill(victim, signal.SIGKILL)
    bench.wait_until(lambda: bench.causes(run) != [], PATIENCE, lambda: bench.story(run))
    assert bench.wait_for_end(run) == "COMPLETED", bench.story(run)
    assert bench.causes(run) == ["crash", "finished"]
    assert "rank 1 on node2 was killed by SIGKILL" in jobs.events(run, "ended")[0].reason
    assert "hpcrun: kills the ranks that do not answer SIGTERM" in bench.batch_log(run)
