"""AMD's GPUs, on driver files made from ``amd_nodes.yaml``."""

import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from hpcrun.devices import devices as amd
from hpcrun.devices.affinity import divide, flat, gpu_cpus
from hpcrun.devices.devices import amd_gpu_use, visible_gpus
from hpcrun.train.metrics import log

MACHINES: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "amd_nodes.yaml").read_text())


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def place(bus: str) -> int:
    """Return the driver's ``location_id`` of a PCI address."""
    _, number, rest = bus.split(":")
    slot, function = rest.split(".")
    return int(number, 16) << 8 | int(slot, 16) << 3 | int(function)


def build(folder: Path, machine: str) -> Any:
    """Write the files that the driver of ``machine`` would show, and return its description."""
    nodes, pci, found = folder / "nodes", folder / "pci", MACHINES[machine]
    for number in range(found["cpu_nodes"]):
        write(
            nodes / str(number) / "properties", "simd_count 0\nlocation_id 0\ndomain 0\nunique_id 0"
        )
    for number, gpu in enumerate(found["gpus"], found["cpu_nodes"]):
        lines = ["simd_count 440", f"location_id {place(gpu['bus'])}", "domain 0"]
        write(
            nodes / str(number) / "properties",
            "\n".join([*lines, f"unique_id {gpu['unique_id']}"]),
        )
        own = pci / gpu["bus"].lower()
        write(own / "local_cpulist", gpu["cpus"])
        write(own / "gpu_busy_percent", str(gpu.get("busy", 0)))
        write(own / "mem_info_vram_used", str(gpu.get("used", 0)))
    return SimpleNamespace(
        nodes=nodes,
        pci=pci,
        buses=[gpu["bus"].lower() for gpu in found["gpus"]],
        gpus=found["gpus"],
    )


@pytest.fixture
def machine(request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a node of ``amd_nodes.yaml``, in place of this machine; NVML is installed without a driver."""
    here = build(tmp_path, request.param)
    # The functions have the paths as defaults.
    monkeypatch.setattr(amd.gpu_addresses, "__defaults__", (here.nodes,))
    for function in (amd.near_cpus, amd.use):
        monkeypatch.setattr(function, "__defaults__", (here.pci,))
    monkeypatch.setitem(sys.modules, "pynvml", None)
    return here


@pytest.mark.parametrize("machine", MACHINES, indirect=True)
def test_ranks_get_equal_shares_near_their_gpus(machine: Any) -> None:
    near = gpu_cpus({})
    apart = 64 if machine.gpus[0]["bus"] == "0000:C1:00.0" else 96
    cores = [(cpu, cpu + apart) for cpu in range(apart)]
    shares = divide(cores, near)
    assert len(near) == 8
    assert {len(share) for share in shares} == {apart // 8}
    assert all(mine.issuperset(flat(share)) for share, mine in zip(shares, near, strict=True))
    if apart == 64:
        # The users' guides bind the first rank to cores 48 to 55.
        assert flat(shares[0]) == [*range(48, 56), *range(112, 120)]


@pytest.mark.parametrize("machine", ["mi250x"], indirect=True)
@pytest.mark.parametrize(
    ("environ", "shown"),
    [
        ({}, [0, 1, 2, 3, 4, 5, 6, 7]),
        ({"ROCR_VISIBLE_DEVICES": "4,5"}, [4, 5]),
        # HIP counts what the runtime shows.
        ({"ROCR_VISIBLE_DEVICES": "4,5", "HIP_VISIBLE_DEVICES": "1"}, [5]),
        ({"CUDA_VISIBLE_DEVICES": "7,0"}, [7, 0]),
        ({"CUDA_VISIBLE_DEVICES": "7", "HIP_VISIBLE_DEVICES": "2"}, [2]),
        ({"ROCR_VISIBLE_DEVICES": "GPU-1f9de0957d137903"}, [2]),
        ({"HIP_VISIBLE_DEVICES": "1,9,2"}, [1]),
        ({"HIP_VISIBLE_DEVICES": ""}, []),
    ],
)
def test_gpus_are_in_the_order_in_which_hip_shows_them(
    machine: Any, environ: dict[str, str], shown: list[int]
) -> None:
    assert amd.gpu_addresses(environ) == [machine.buses[index] for index in shown]


@pytest.mark.parametrize("machine", ["mi300x"], indirect=True)
def test_hidden_gpus_and_parts_of_a_gpu(machine: Any) -> None:
    # The kernel numbers the parts of a GPU (CPX mode) in the highest bits; 10 comes after 9.
    text = f"simd_count 152\nlocation_id {place('0000:E5:00.0') | 1 << 28}\ndomain 0\nunique_id 8"
    write(machine.nodes / "10" / "properties", text)
    (machine.nodes / "3" / "properties").unlink()  # hidden by a control group
    machine.buses.pop(1)
    assert amd.gpu_addresses({}) == [*machine.buses, "0000:e5:00.0"]
    assert visible_gpus({}, machine.pci / "none", machine.nodes, machine.nodes) == 8


@pytest.mark.parametrize("machine", ["mi300x"], indirect=True)
def test_a_rank_samples_its_own_gpu(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "6,7")
    asked: list[str] = []
    monkeypatch.setattr(log, "amd_gpu_use", asked.append)
    log.own_gpu_use(torch.device("cuda", 1))
    log.own_gpu_use(torch.device("cuda", 2))
    assert asked == ["0000:e5:00.0"]

    write(machine.pci / asked[0] / "gpu_busy_percent", "87")
    use = amd_gpu_use(asked[0], every=0.001)
    assert use is not None
    found, until = use.read(), time.monotonic() + 60
    while found[0] != 87.0 and time.monotonic() < until:
        time.sleep(0.01)
        found = use.read()
    use.close()
    assert found == (87.0, 297771008.0)

    # A virtual function has no utilization.
    (machine.pci / asked[0] / "gpu_busy_percent").unlink()
    assert amd_gpu_use(asked[0]) is None
    assert gpu_cpus({"HIP_VISIBLE_DEVICES": "0"}) == [frozenset([*range(48), *range(96, 144)])]
    (machine.pci / machine.buses[0] / "local_cpulist").unlink()
    assert gpu_cpus({"HIP_VISIBLE_DEVICES": "0"}) == []
