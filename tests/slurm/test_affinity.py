"""The CPUs of a rank, and the cases in which its mask stays unchanged."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpcrun.devices.affinity import (
    Core,
    bind_rank,
    cores_of,
    cpus_of_rank,
    divide,
    gpu_cpus,
    is_bound,
)


def flat(cores: list[Core]) -> list[int]:
    return sorted(cpu for core in cores for cpu in core)


# Two sockets of four cores with two threads each, numbered as in Linux: siblings are 8 apart.
CORES = [(cpu, cpu + 8) for cpu in range(8)]
FIRST = frozenset({0, 1, 2, 3, 8, 9, 10, 11})
SECOND = frozenset({4, 5, 6, 7, 12, 13, 14, 15})
ANYWHERE: frozenset[int] = frozenset()


def shares(near: list[frozenset[int]]) -> list[list[int]]:
    return [[core[0] for core in share] for share in divide(CORES, near)]


def test_without_gpus_the_cores_are_divided_evenly_in_order() -> None:
    assert shares([ANYWHERE] * 2) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert shares([ANYWHERE] * 3) == [[0, 1, 2], [3, 4, 5], [6, 7]]


def test_each_rank_gets_the_cores_near_its_gpu() -> None:
    assert shares([SECOND, FIRST]) == [[4, 5, 6, 7], [0, 1, 2, 3]]
    assert shares([FIRST, SECOND, FIRST, SECOND]) == [[0, 1], [4, 5], [2, 3], [6, 7]]


def test_no_core_idles_where_all_gpus_are_at_one_socket() -> None:
    assert shares([SECOND, SECOND]) == [[4, 5, 0, 1], [6, 7, 2, 3]]


@pytest.mark.parametrize("near", [[FIRST, SECOND, SECOND], [FIRST, ANYWHERE, SECOND], [FIRST] * 5])
def test_every_core_goes_to_exactly_one_rank(near: list[frozenset[int]]) -> None:
    given = divide(CORES, near)
    assert flat([core for share in given for core in share]) == flat(CORES)
    sizes = [len(share) for share in given]
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
    assert (cpus_of_rank(given, 2), bind_rank(given, 0, 2, gpu=False)) == (1, 1)
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


class NVMLError(Exception):
    pass


def fake_nvml(masks: dict[object, list[int]]) -> SimpleNamespace:
    def affinity(handle: object, words: int) -> list[int]:
        if handle not in masks:
            raise NVMLError
        return masks[handle]

    return SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: len(masks),
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetCpuAffinity=affinity,
    )


def test_gpus_are_asked_in_cuda_s_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    masks: dict[object, list[int]] = {0: [0b11], 1: [0b1100], "GPU-a": [0, 1]}
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(masks))
    assert gpu_cpus({"CUDA_VISIBLE_DEVICES": "1,0"}) == [{2, 3}, {0, 1}]
    assert gpu_cpus({"CUDA_VISIBLE_DEVICES": "GPU-a"}) == [{64}]
    assert gpu_cpus({"CUDA_VISIBLE_DEVICES": "MIG-b"}) == []
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpu_cpus({}) == []


BIND = """
import os, sys
from hpcrun.devices.affinity import bind_rank
own = bind_rank({}, int(sys.argv[1]), 2, gpu=False)
again = bind_rank({}, int(sys.argv[1]), 2, gpu=False)
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
