"""A real Slurm per test session, for every test in this directory."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterator

import pytest

from hpcrun.run.directory import RunDirectory

from . import cluster, training


def unavailable(
    reason: str, version: str = cluster.VERSION, features: Collection[str] = ()
) -> None:
    """Skip without a Slurm; fail if CI requires it.

    A ``version`` or one of ``features`` with packages that cannot be downloaded is skipped in CI too.
    """
    if os.environ.get("HPCRUN_REQUIRE_SLURM") == "1" and not cluster.excused(version, features):
        pytest.fail(f"HPCRUN_REQUIRE_SLURM=1, but: {reason}")
    pytest.skip(reason)


@pytest.fixture(scope="session")
def slurm() -> Iterator[cluster.SlurmCluster]:
    """Four nodes with four GPUs each, `batch` and `urgent` partitions, no accounting."""
    reason = cluster.why_not()
    if reason is not None:
        unavailable(reason)
    cluster.remove_abandoned()
    name = f"pytest-{os.getpid()}"
    try:
        running = cluster.start(name)
        if not cluster.can_read(running.user, sys.executable):
            unavailable(
                f"{running.user} cannot run {sys.executable} or read {training.ROOT}: use tools/test.sh, "
                "or put both where every user can read them"
            )
        yield running
    finally:
        cluster.stop(name)


@pytest.fixture
def bench(slurm: cluster.SlurmCluster) -> Iterator[training.Bench]:
    """A folder to submit probe runs from; its jobs and files are removed after the test."""
    place = training.Bench(slurm)
    yield place
    slurm.heal()
    place.remove()


@pytest.fixture(scope="session")
def calm(slurm: cluster.SlurmCluster) -> RunDirectory:
    """The undisturbed probe run; every disturbed run must end with its state."""
    place = training.Bench(slurm, "calm")
    run = place.submit("calm", checkpoint__every=0)
    assert place.wait_for_end(run) == "COMPLETED", place.story(run)
    return run
