"""Threads for each rank."""

from __future__ import annotations

import os

import pytest

from hpcrun.cluster.errors import ClusterError
from hpcrun.cluster.threads import threads_per_rank


@pytest.mark.parametrize(
    ("environ", "threads"),
    [
        ({"OMP_NUM_THREADS": "3", "SLURM_CPUS_PER_TASK": "8"}, 3),
        ({"OMP_NUM_THREADS": "4,2"}, 4),
        ({"OMP_NUM_THREADS": "", "SLURM_CPUS_PER_TASK": "8"}, 8),
    ],
)
def test_the_variables_decide_in_order(environ: dict[str, str], threads: int) -> None:
    assert threads_per_rank(environ, ranks_on_node=4) == threads


def test_otherwise_the_ranks_share_the_cores_of_this_process() -> None:
    cores = len(os.sched_getaffinity(0))
    assert threads_per_rank({}, ranks_on_node=1) == cores
    assert threads_per_rank({}, ranks_on_node=cores) == 1
    assert threads_per_rank({}, ranks_on_node=10 * cores) == 1


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "SLURM_CPUS_PER_TASK"])
@pytest.mark.parametrize("value", ["0", "two", "-1"])
def test_a_wrong_number_is_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(ClusterError, match=name):
        threads_per_rank({name: value}, ranks_on_node=1)
