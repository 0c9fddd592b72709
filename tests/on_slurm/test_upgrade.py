"""An upgrade of hpcrun under a live job of two nodes, on a real Slurm."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping

import pytest

from tests.support import jobs
from tests.support.upgrades import install, mixed, upgrade

from .cluster import SlurmCluster
from .training import Bench

pytestmark = [pytest.mark.slurm, pytest.mark.lifecycle]


class UpgradedBench(Bench):
    """A bench with a separate installation of hpcrun."""

    def __init__(self, slurm: SlurmCluster) -> None:
        super().__init__(slurm)
        self.site = self.folder / "site"
        install(self.site)

    def environ(self, env: Mapping[str, str] | None = None) -> dict[str, str]:
        return {**super().environ(env), "PYTHONPATH": str(self.site)}


@pytest.fixture
def bench(slurm: SlurmCluster) -> Iterator[UpgradedBench]:
    place = UpgradedBench(slurm)
    yield place
    slurm.heal()
    place.remove()


def test_after_an_upgrade_a_crash_restarts_by_a_requeue(bench, calm):
    run = bench.submit("upgraded", model__pause=0.03, train__timeout=600)
    with bench.held_at(run, 14):
        (victim,) = bench.pids(run, 1)
        upgrade(bench.site)
        os.kill(victim, signal.SIGKILL)
    state = bench.wait_for_end(run)
    assert mixed(run) == []
    assert (state, bench.slurm.restarts(bench.job(run))) == ("COMPLETED", 1)
    assert bench.causes(run) == ["crash", "finished"], bench.story(run)
    assert [event.attempt.in_place for event in jobs.events(run, "opened")] == [0, 0]
    assert "hpcrun was upgraded while the job ran" in bench.batch_log(run)
    assert jobs.final_state(run) == jobs.final_state(calm)
