"""Seeded trials of the network check on eight hosts: each trial names exactly the injected fault.

HPCRUN_TRIALS sets the number of trials per fault (default: 3).
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import pytest

from . import cluster
from .cluster import SlurmCluster
from .conftest import unavailable
from .planted_faults import FAULTS, check, named, planted

pytestmark = [pytest.mark.slurm, pytest.mark.slow]
TRIALS = int(os.environ.get("HPCRUN_TRIALS", "3"))
QUICK = (
    "--seconds",
    "0.5",
    "--streams",
    "1",
    "--patience",
    "200",
    "--all-reduce",
    "0",
)


@pytest.fixture(scope="module")
def eight() -> Iterator[SlurmCluster]:
    """A cluster of eight hosts."""
    reason = cluster.why_not()
    if reason is not None:
        unavailable(reason)
    name = f"pytest-trials-{os.getpid()}"
    try:
        yield cluster.start(name, nodes=8)
    finally:
        cluster.stop(name)


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_named_in_all_trials(eight: SlurmCluster, fault: str) -> None:
    wrong = []
    for seed in range(TRIALS):
        with planted(eight, fault, random.Random(f"{fault} {seed}")) as right:
            report = check(eight, *QUICK)
        if not right(report):
            wrong.append((seed, named(report)))
    assert wrong == []
