"""A failed script gets the same cause on Slurm as on the local cluster (tests/slurm/launch)."""

from __future__ import annotations

import pytest

from tests.support import failing_scripts, jobs
from tests.support.failing_scripts import NAMES

from .cluster import SlurmCluster
from .scripts import ENDED, Bench

pytestmark = pytest.mark.slurm

RANKS = 4
# The first cause, not srun's SIGTERM to the other ranks.
_ALWAYS = ("raises-last", "killed")


@pytest.fixture(scope="module")
def bench(slurm: SlurmCluster) -> Bench:
    bench = Bench(slurm)
    bench.write("fails.py", failing_scripts.PROGRAM)
    bench.write("wrap.sh", failing_scripts.WRAPPER)
    return bench


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.lifecycle if name in _ALWAYS else pytest.mark.slow)
        for name in NAMES
    ],
)
def test_a_failed_script_gets_its_cause_and_message(name: str, bench: Bench) -> None:
    way = NAMES[name]
    options = ["restarts.crash=0", *way.options]
    if name == "hang":
        # Slurm's shortest limit; the signal may come a minute early.
        options += ["job.time=1", "job.signal_lead=20"]
    run = bench.submit(name, *options, "--", *way.command)
    bench.slurm.wait_until(run.result.exists, ENDED, lambda: bench.told(run))
    failing_scripts.check(way, jobs.result(run), RANKS)
    assert len(jobs.events(run, "opened")) == 1, bench.told(run)
