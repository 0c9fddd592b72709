"""Facts from /sys, read from a folder that imitates a machine with RDMA devices."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcrun.network.nccl.machine import inspect_node, read_rdma


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine with 2 ports of InfiniBand, 1 of RoCE that is down, 2 Slingshot devices and 2 MI300X."""
    files = {
        "sys/class/infiniband/mlx5_10/ports/1/state": "4: ACTIVE",
        "sys/class/infiniband/mlx5_10/ports/1/rate": "400 Gb/sec (4X NDR)",
        "sys/class/infiniband/mlx5_10/ports/1/link_layer": "InfiniBand",
        "sys/class/infiniband/mlx5_2/ports/1/state": "4: ACTIVE",
        "sys/class/infiniband/mlx5_2/ports/1/rate": "400 Gb/sec (4X NDR)",
        "sys/class/infiniband/mlx5_2/ports/1/link_layer": "InfiniBand",
        "sys/class/infiniband/mlx5_11/ports/1/state": "1: DOWN",
        "sys/class/infiniband/mlx5_11/ports/1/rate": "40 Gb/sec (4X QDR)",
        "sys/class/infiniband/mlx5_11/ports/1/link_layer": "Ethernet",
        "sys/class/cxi/cxi0/x": "",
        "sys/class/cxi/cxi1/x": "",
        "sys/class/drm/card0/device/vendor": "0x1a03",
        "sys/class/drm/card1/device/vendor": "0x1002",
        "sys/class/drm/card1/device/device": "0x74a1",
        "sys/class/drm/card2/device/vendor": "0x1002",
        "sys/class/drm/card2/device/device": "0x74a1",
        "sys/module/nvidia_peermem/x": "",
        "proc/net/route": "Iface\tDestination\nens1\t0002000A\nens2\t00000000\n",
        "proc/sys/kernel/numa_balancing": "1\n",
        "dev/infiniband/uverbs0": "",
        "opt/lib/libnccl-net.so": "",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    driver = tmp_path / "drivers" / "mlx5_core"
    driver.mkdir(parents=True)
    (tmp_path / "sys/class/infiniband/mlx5_2/device").mkdir()
    (tmp_path / "sys/class/infiniband/mlx5_2/device/driver").symlink_to(driver)
    return tmp_path


def test_ports_are_read_in_the_order_of_their_numbers(root: Path) -> None:
    ports = read_rdma(root)
    assert [port.device for port in ports] == ["mlx5_2", "mlx5_10", "mlx5_11"]
    assert [(port.layer, port.rate, port.active) for port in ports] == [
        *(("InfiniBand", 400, True), ("InfiniBand", 400, True), ("Ethernet", 40, False))
    ]
    assert ports[0].driver == "mlx5_core"


def test_a_node_is_inspected(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(root))
    facts = inspect_node({"LD_LIBRARY_PATH": f"/nowhere:{root / 'opt/lib'}"}, root=root)
    assert facts.cxi == 2
    assert facts.gpus == ("AMD GPU", "AMD GPU")
    assert facts.amd
    assert facts.route == "ens2"
    assert facts.verbs
    assert facts.peermem
    assert facts.numa_balancing
    assert facts.plugins == (str(root / "opt/lib/libnccl-net.so"),)
    assert not facts.loopback_name


def test_a_machine_without_anything_is_inspected_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    facts = inspect_node({}, root=tmp_path)
    assert (facts.rdma, facts.cxi, facts.gpus, facts.plugins) == ((), 0, (), ())
    assert (facts.route, facts.verbs, facts.numa_balancing) == (None, False, None)
