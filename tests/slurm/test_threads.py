"""Threads for each rank."""

from __future__ import annotations

import pytest

from hpcrun.errors import ClusterError
from hpcrun.train.environment import threads_per_rank


@pytest.mark.parametrize(
    ("environ", "threads"),
    [
        ({"OMP_NUM_THREADS": "3", "SLURM_CPUS_PER_TASK": "8"}, 3),
        ({"OMP_NUM_THREADS": "4,2"}, 4),
        ({"OMP_NUM_THREADS": "", "SLURM_CPUS_PER_TASK": "8"}, 8),
    ],
)
def test_the_variables_decide_in_order(environ: dict[str, str], threads: int) -> None:
    assert threads_per_rank(environ, cpus=4) == threads


def test_otherwise_a_rank_uses_the_cpus_it_has() -> None:
    assert threads_per_rank({}, cpus=3) == 3


def test_the_ranks_of_a_task_share_its_cpus() -> None:
    assert threads_per_rank({}, cpus=9, ranks=4) == 2
    assert threads_per_rank({"SLURM_CPUS_PER_TASK": "32"}, cpus=1, ranks=4) == 8
    assert threads_per_rank({"OMP_NUM_THREADS": "3"}, cpus=32, ranks=4) == 3
    assert threads_per_rank({}, cpus=2, ranks=4) == 1


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "SLURM_CPUS_PER_TASK"])
@pytest.mark.parametrize("value", ["0", "two", "-1"])
def test_a_wrong_number_is_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(ClusterError, match=name):
        threads_per_rank({name: value}, cpus=1)
