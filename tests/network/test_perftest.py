"""RDMA with ib_write_bw: the command line, its output, and the two ends with a program of the same form."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from hpcrun.network.link_table import link_lines
from hpcrun.network.measurements import NameCheck, NetworkMeasurements, RdmaTransfer, Transfer
from hpcrun.network.nccl.machine import RdmaPort
from hpcrun.network.perftest import (
    Perftest,
    chosen_port,
    ib_write_bw_command,
    parse_ib_write_bw,
    problem_of,
)
from hpcrun.network.rdma import RdmaCheck, rdma_lines

# The client's report, from linux-rdma/perftest#273 (RoCE) and from an older version.
GBITS = """---------------------------------------------------------------------------------------
                    RDMA_Write BW Test
 Dual-port       : OFF\t\tDevice         : mlx5_0
 Number of qps   : 1\t\tTransport type : IB
 Connection type : RC\t\tUsing SRQ      : OFF
 Mtu             : 4096[B]
 Link type       : IB
---------------------------------------------------------------------------------------
 local address: LID 0x1907 QPN 0x0809 PSN 0x6d058e RKey 0x1fffb9 VAddr 0x007f58a406e000
 remote address: LID 0x1922 QPN 0x0855 PSN 0xc6797b RKey 0x1fffb9 VAddr 0x007f71dddd9000
---------------------------------------------------------------------------------------
 #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]
 65536      751660           0.00               197.05 \t\t   0.375841
---------------------------------------------------------------------------------------
"""
MEBIBYTES = """ WARNING: BW peak won't be measured in this run.
 #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]
 65536      664644           0.00               11728.47\t\t   0.187656
"""
# Recorded with perftest 4.5 on a machine without a device.
NO_DEVICE = """ Did not detect devices
 If device exists, check if driver is up
 Unable to find the Infiniband/RoCE device
"""
STAND_IN = f"""#!{sys.executable}
import socket, sys
words = sys.argv[1:]
port = int(words[words.index("--port") + 1])
if words[-1].count(".") == 3:
    try:
        link = socket.create_connection((words[-1], port))
    except OSError:
        sys.exit("Couldn't connect to %s:%d" % (words[-1], port))
    link.recv(1)
    print({GBITS!r})
else:
    with socket.create_server(("", port)) as server:
        server.accept()[0].sendall(b"x")
"""


def device(root: Path, name: str, *, layer: str, state: str = "4: ACTIVE", rate: str) -> None:
    port = root / "sys/class/infiniband" / name / "ports" / "1"
    port.mkdir(parents=True)
    for file, text in (("link_layer", layer), ("state", state), ("rate", rate)):
        (port / file).write_text(f"{text}\n")


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a program with the command line and the output of ib_write_bw on the path."""
    (tmp_path / "bin").mkdir()
    path = tmp_path / "bin" / "ib_write_bw"
    path.write_text(STAND_IN)
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")
    return path


def test_the_command_line_and_the_report_of_each_version() -> None:
    port = RdmaPort("mlx5_4", 2, "InfiniBand", True)
    server = ib_write_bw_command(port, 18001, 3)
    assert " ".join(server) == (
        "ib_write_bw --ib-dev mlx5_4 --ib-port 2 --port 18001 --duration 3 --report_gbits --CPU-freq"
    )
    assert ib_write_bw_command(port, 18001, 3, "10.0.0.2") == [*server, "10.0.0.2"]
    assert parse_ib_write_bw(GBITS) == pytest.approx(197.05e9)
    assert parse_ib_write_bw(MEBIBYTES) == pytest.approx(11728.47 * 2**20 * 8)
    assert parse_ib_write_bw(MEBIBYTES.replace("MB/sec", "MiB/sec")) == pytest.approx(
        98.38e9, rel=1e-3
    )
    for text in ("", NO_DEVICE, GBITS.partition(" 65536")[0], GBITS.replace("197.05", "nothing")):
        assert parse_ib_write_bw(text) is None
    assert problem_of(NO_DEVICE) == "Unable to find the Infiniband/RoCE device"
    assert problem_of("") == "no result"


def test_a_node_without_device_or_program_has_an_obstacle(
    tmp_path: Path, program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Perftest(tmp_path).facts() == {"device": None, "obstacle": "no RDMA device"}
    assert Perftest(tmp_path).serve(1) == {"problem": "no RDMA device"}
    device(tmp_path, "mlx5_0", layer="InfiniBand", state="1: DOWN", rate="200 Gb/sec")
    assert "no active port" in str(chosen_port(tmp_path))
    device(tmp_path, "mlx5_1", layer="Ethernet", rate="400 Gb/sec (4X NDR)")
    assert Perftest(tmp_path).facts()["device"] == "mlx5_1:1"
    device(tmp_path, "mlx5_2", layer="InfiniBand", rate="100 Gb/sec (4X EDR)")
    device(tmp_path, "mlx5_3", layer="InfiniBand", rate="200 Gb/sec (4X HDR)")
    assert Perftest(tmp_path).facts() == {"device": "mlx5_3:1", "obstacle": None}
    program.unlink()
    monkeypatch.setenv("PATH", str(program.parent))
    assert "not installed (package perftest)" in str(chosen_port(tmp_path))


class Here:
    """Nodes that are objects of this process, and answer the orders of the coordinator."""

    def __init__(self, **nodes: Path) -> None:
        self.live = list(nodes)
        self._ends = {name: Perftest(root) for name, root in nodes.items()}

    def ask(
        self, what: str, _: float, nodes: Any = None, /, *, lose: bool = True, **order: Any
    ) -> Any:
        found = {}
        for name in self.live if nodes is None else [one for one in self.live if one in nodes]:
            end = self._ends[name]
            if what == "rdma":
                found[name] = end.facts()
            elif what == "rdma-serve":
                found[name] = end.serve(order["seconds"])
            else:
                found[name] = end.measure(*order["servers"][name], order["seconds"])
        return found

    def close(self) -> None:
        for end in self._ends.values():
            end.close()


def test_the_pairs_are_measured_each_way_and_shown(tmp_path: Path, program: Path) -> None:
    device(tmp_path / "a", "mlx5_0", layer="InfiniBand", rate="200 Gb/sec")
    nodes = Here(n1=tmp_path / "a", n2=tmp_path / "a", n3=tmp_path / "none")
    check = RdmaCheck(nodes, dict.fromkeys(nodes.live, "127.0.0.1"), 1)  # type: ignore[arg-type]
    check.run(lambda *_: None)
    assert [(one.sender, one.receiver, one.rate) for one in check.transfers] == [
        ("n1", "n2", pytest.approx(197.05e9)),
        ("n2", "n1", pytest.approx(197.05e9)),
    ]
    assert rdma_lines(check.transfers, check.missing) == ["RDMA not measured on n3: no RDMA device"]
    program.write_text(f"#!/bin/sh\ncat >&2 <<'END'\n{NO_DEVICE}END\nexit 1\n")
    check = RdmaCheck(nodes, dict.fromkeys(nodes.live, "127.0.0.1"), 1)  # type: ignore[arg-type]
    check.run(lambda *_: None)
    nodes.close()
    assert rdma_lines(check.transfers, {}) == [
        f"RDMA from {way}: ib_write_bw: Unable to find the Infiniband/RoCE device"
        for way in ("n1 to n2", "n2 to n1")
    ]
    assert rdma_lines([], {"n1": "no RDMA device", "n2": "no RDMA device"}) == [
        "RDMA not measured: no RDMA device"
    ]


def test_the_table_of_links_has_a_line_for_each_direction() -> None:
    measured = NetworkMeasurements(["n1", "n10"])
    measured.names = [NameCheck("n1", "n10", "10.0.0.10", 41e-6)]
    measured.transfers = [
        Transfer("n10", "n1", None, refused=True),
        Transfer("n1", "n10", 9.4e9, lost=0.002),
        Transfer("n1", "n10", 48e6, lost=0.21, again_for=("n10",)),
    ]
    assert link_lines(measured) == [
        "from  to         rate  round trip  resent",
        "n1    n10  9.4 Gbit/s       41 µs    0.2%",
        "n1    n10   48 Mbit/s       41 µs   21.0%  again, for n10",
        "n10   n1            -           -       -  refused",
    ]
    measured.rdma = [RdmaTransfer("n1", "n10", "mlx5_0:1", 197e9)]
    assert link_lines(measured)[0].split() == [
        "from",
        "to",
        "rate",
        "RDMA",
        "round",
        "trip",
        "resent",
    ]
    assert link_lines(measured)[1].split()[2:6] == ["9.4", "Gbit/s", "197", "Gbit/s"]
    assert measured.rdma[0].as_record()["bits_per_second"] == 197e9
