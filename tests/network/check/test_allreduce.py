"""The all-reduce over all nodes: orders, figures and failures, with simulated agents."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hpcrun.network.check import all_reduce as node_ranks
from hpcrun.network.check.all_reduce import MIB, bus_bandwidth
from hpcrun.network.check.coordinator import Check, Options
from hpcrun.network.check.findings import findings
from hpcrun.network.check.measurements import Collective, NetworkMeasurements
from hpcrun.network.check.report import as_data, collective_line

FIGURES = {"bytes": 4 * MIB, "seconds": 0.01, "busbw": 6e8}


class Played:
    """Agents that answer correctly, except nodes with ranks that hang, fail or cannot start."""

    def __init__(self, count: int, gpus: int = 0, **problems: str) -> None:
        self._answers: deque[dict[str, Any]] = deque()
        self._problems = {int(key[1:]): problem for key, problem in problems.items()}
        self._gpus = gpus
        self.nodes = [f"n{index}" for index in range(count)]
        self.groups: list[list[dict[str, Any]]] = []
        for index, name in enumerate(self.nodes):
            self._say(
                index,
                "hello",
                node=name,
                port=1,
                addresses={f"10.0.0.{index}": 1500},
                iperf3=False,
                door={"interfaces": {}},
            )

    def _say(self, index: int, kind: str, **facts: Any) -> None:
        self._answers.append({"index": index, "type": kind, "node": self.nodes[index], **facts})

    def tell(self, order: Mapping[str, Any]) -> None:
        """Answer immediately."""
        kind = order["type"]
        for index in range(len(self.nodes)):
            if kind == "peers":
                self._say(index, "ready")
            elif kind == "interfaces":
                self._say(index, "interfaces", names=["eth0", "eth1"][: 1 + index])
            elif kind == "names":
                self._say(index, "names", checks=[], done=True)
        if kind == "round":
            self._round(order)
        elif kind == "prepare":
            for index in order["nodes"]:
                lost = self._problems.get(index) == "no torch"
                here = {"stage": "here", "gpus": self._gpus, "port": 5000 + index}
                self._say(
                    index,
                    "prepare",
                    **({"stage": "failed", "problem": "no torch"} if lost else here),
                )
        elif kind == "collective":
            self.groups.append(order["groups"])
            for group in order["groups"]:
                self._group(group)

    def _round(self, order: Mapping[str, Any]) -> None:
        for pair in order["pairs"]:
            for index in pair:
                facts = {"connected": True, "refused": False, "lost": 0.0, "received": 1e9}
                self._say(index, "round", round=order["round"], **facts)

    def _group(self, group: Mapping[str, Any]) -> None:
        members = [index for index, _, _ in group["members"]]
        bad = {self._problems[index] for index in members if index in self._problems}
        for index in members:
            if self._problems.get(index) == "fails":
                self._say(index, "collective", stage="failed", problem="no such interface")
            elif bad:
                self._say(index, "collective", stage="hangs", after="here")
            else:
                self._say(index, "collective", stage="done", **FIGURES)

    def hear(self, timeout: float) -> dict[str, Any] | None:
        """Return the next answer."""
        return self._answers.popleft() if self._answers else None

    def words(self) -> str:
        """Return nothing."""
        return ""

    def ended(self) -> bool:
        """Return False."""
        return False

    def close(self) -> None:
        """Do nothing."""


def silence(step: int, steps: int, text: str) -> None:
    """Show nothing."""


def measured(fleet: Played, **options: Any) -> NetworkMeasurements:
    """Return the measurements of a check of the fleet."""
    return Check(fleet, fleet.nodes, Options(**{"all_reduce": 30.0, **options}), silence).run()


def seen_by(fleet: Played) -> Collective:
    """Return the all-reduce of a check of the fleet."""
    found = measured(fleet).collective
    assert found is not None
    return found


def test_the_bus_bandwidth_is_that_of_nccl_tests() -> None:
    # nccl-tests, PERFORMANCE.md: B = S/t * 2*(n-1)/n.
    assert bus_bandwidth(1_000_000, 0.001, 2) == pytest.approx(1e9)
    assert bus_bandwidth(1_000_000, 0.001, 4) == pytest.approx(1.5e9)


def test_all_nodes_take_part_and_the_figures_are_in_the_report() -> None:
    fleet = Played(4)
    found = measured(fleet)
    assert findings(found) == []
    assert found.interface == "eth0"
    seen = found.collective
    assert seen == Collective(tuple(fleet.nodes), "gloo", 4, 4 * MIB, 0.01, 6e8)
    assert collective_line(seen) == (
        "all-reduce over 4 nodes (gloo, 4 ranks): 4 MiB in 10 ms, busbw 0.6 GB/s"
    )
    assert as_data(found, [])["collective"]["busbw_bytes_per_second"] == 6e8
    ((order,),) = fleet.groups
    assert (order["address"], order["port"]) == ("10.0.0.0", 5000)
    assert order["members"] == [[0, 0, 1], [1, 1, 1], [2, 2, 1], [3, 3, 1]]


def test_every_gpu_has_a_rank() -> None:
    fleet = Played(3, gpus=8)
    assert (seen_by(fleet).backend, seen_by(Played(3, gpus=8)).ranks) == ("nccl", 24)
    assert fleet.groups[0][0]["members"] == [[0, 0, 8], [1, 8, 8], [2, 16, 8]]


def test_no_all_reduce_is_asked_for_with_0() -> None:
    fleet = Played(4)
    assert measured(fleet, all_reduce=0.0).collective is None
    assert fleet.groups == []


@pytest.mark.parametrize("count", [3, 8, 13])
@pytest.mark.parametrize("problem", ["hangs", "fails", "no torch"])
def test_the_node_with_which_it_fails_is_isolated(count: int, problem: str) -> None:
    found = measured(Played(count, n2=problem))
    (finding,) = findings(found)
    assert (finding.kind, finding.nodes) == ("collective", ("n2",))
    words = {
        "hangs": "no result after 3",
        "fails": "no such interface",
        "no torch": "no torch",
    }[problem]
    assert words in finding.text
    assert "GLOO_SOCKET_IFNAME" in finding.text
    assert found.collective is not None
    assert words in collective_line(found.collective)


def test_a_failure_of_two_nodes_is_that_of_both() -> None:
    (finding,) = findings(measured(Played(2, n1="hangs")))
    assert (finding.kind, finding.nodes) == ("collective", ())
    assert "over 2 nodes" in finding.text


def test_a_rank_that_ends_silently_differs_from_a_rank_that_hangs(tmp_path: Path) -> None:
    def node_of(code: str) -> node_ranks.NodeRanks:
        return node_ranks.NodeRanks((sys.executable, "-c", code))

    node = node_of("import sys; sys.exit('no module named torch')")
    assert node.prepare() == {"stage": "failed", "problem": "no module named torch", "after": None}
    here = 'print(\'{"stage": "here", "gpus": 3, "port": 1}\', flush=True);'
    note = f"import os, pathlib, time; pathlib.Path({str(tmp_path)!r}, str(os.getpid())).touch();"
    node = node_of(f"{note} {here} time.sleep(600)")
    assert node.prepare()["gpus"] == 3
    started = [path.name for path in tmp_path.iterdir()]
    assert len(started) == 3
    assert node.run({"count": 3, "rank": 0, "limit": 0.1}) == {"stage": "hangs", "after": "here"}
    assert not any(Path("/proc", process).exists() for process in started)
