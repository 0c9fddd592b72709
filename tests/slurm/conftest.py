"""One real Slurm a test session, for every test below this directory."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

from . import cluster


def unavailable(reason: str) -> None:
    """Skip where there is no Slurm to be had; fail where CI promised one."""
    if os.environ.get("HPCRUN_REQUIRE_SLURM") == "1":
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
                f"{running.user} cannot run {sys.executable}: put the virtual environment and the "
                "checkout where every user can read them"
            )
        yield running
    finally:
        cluster.stop(name)
