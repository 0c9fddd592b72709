"""The CPUs of a rank, and the cases in which its mask stays unchanged."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpcrun.devices.affinity import bind_rank, cores_of, cpus_of_rank, is_bound, share

# Two sockets of four cores with two threads each, numbered as in Linux: siblings are 8 apart.
CORES = [(cpu, cpu + 8) for cpu in range(8)]


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_every_core_goes_to_exactly_one_rank_in_order(ranks: int) -> None:
    given = [share(CORES, rank, ranks) for rank in range(ranks)]
    assert [core for one in given for core in one] == CORES
    sizes = [len(one) for one in given]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("allowed", "environ", "parents", "bound"),
    [
        (4, {"SLURM_CPUS_ON_NODE": "16"}, 64, True),
        (16, {"SLURM_CPUS_ON_NODE": "16"}, 64, False),
        (4, {}, 16, True),
        (16, {}, 16, False),
    ],
)
def test_a_mask_that_a_launcher_has_set_is_seen(
    allowed: int, environ: dict[str, str], parents: int, bound: bool
) -> None:
    assert is_bound(allowed, environ, parents) is bound


def test_a_job_that_slurm_does_not_confine_is_not_bound() -> None:
    before = os.sched_getaffinity(0)
    given = {"SLURM_CPUS_ON_NODE": "1"}
    assert (cpus_of_rank(given, 2), bind_rank(given, 0, 2)) == (1, 1)
    assert os.sched_getaffinity(0) == before


def test_threads_of_a_core_stay_together_and_sockets_in_order(tmp_path: Path) -> None:
    for cpu, (socket, siblings) in enumerate([(1, "0,2"), (0, "1,3"), (1, "0,2"), (0, "1,3")]):
        topology = tmp_path / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text(f"{socket}\n")
        (topology / "thread_siblings_list").write_text(f"{siblings}\n")
    assert cores_of({0, 1, 2, 3}, tmp_path) == [(1, 3), (0, 2)]
    # A mask may contain one thread of a core, and a kernel may give no information.
    assert cores_of({0, 1, 3}, tmp_path) == [(1, 3), (0,)]
    assert cores_of({5, 7}, tmp_path) == [(5,), (7,)]


BIND = """
import os, sys
from hpcrun.devices.affinity import bind_rank
own = bind_rank({}, int(sys.argv[1]), 2)
again = bind_rank({}, int(sys.argv[1]), 2)
print(own, again, *sorted(os.sched_getaffinity(0)))
"""


@pytest.mark.skipif(len(cores_of(os.sched_getaffinity(0))) < 2, reason="needs two cores")
def test_two_ranks_are_bound_to_different_halves() -> None:
    masks = []
    for rank in ("0", "1"):
        done = subprocess.run(
            [sys.executable, "-c", BIND, rank], capture_output=True, text=True, check=True
        )
        own, again, *cpus = (int(word) for word in done.stdout.split())
        assert own == again <= len(cpus)
        masks.append(set(cpus))
    assert not masks[0] & masks[1]
    assert masks[0] | masks[1] == os.sched_getaffinity(0)
