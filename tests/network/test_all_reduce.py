"""The all-reduce over all nodes: orders, figures, failures, and the search for the node at fault."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hpcrun.network.findings import as_data, collective_line, findings
from hpcrun.network.measurements import MIB, Collective, NetworkMeasurements, bus_bandwidth
from hpcrun.network.netcheck import Check, Options, isolate
from hpcrun.network.torch_child import NodeRanks

FIGURES = {"stage": "done", "cells": [["all_reduce", MIB, 1e-3], ["all_reduce", 4 * MIB, 0.01]]}
BUSBW = bus_bandwidth(4 * MIB, 0.01, 4)


class Played:
    """Nodes that answer correctly, except those with ranks that hang, fail or cannot start."""

    def __init__(self, count: int, gpus: int = 0, **problems: str) -> None:
        self.live = [f"n{index}" for index in range(count)]
        self.silent: dict[str, str] = {}
        self.ended = False
        self.groups: list[list[dict[str, Any]]] = []
        self._gpus, self._problems = gpus, problems

    def ask(
        self, what: str, _seconds: float, nodes: Any = None, lose: bool = True, **order: Any
    ) -> Any:
        """Answer immediately."""
        if what == "measure":
            self.groups.append(order["groups"])
            return {name: answer for group in order["groups"] for name, answer in self._run(group)}
        return {
            name: self._answer(what, number)
            for number, name in enumerate(self.live)
            if nodes is None or name in nodes
        }

    def _answer(self, what: str, number: int) -> Any:
        if what == "listen":
            return {"port": 1, "addresses": [f"10.0.0.{number}"]}
        if what == "round":
            return {"connected": True, "refused": False, "lost": 0.0, "received": 1e9}
        if what == "network":
            return {"host": f"h{number}"}
        if what == "loopback":
            return 1e9
        if what == "rdma":
            return {"device": None, "obstacle": "no RDMA device"}
        if what == "prepare":
            if self._problems.get(f"n{number}") == "no torch":
                return {"stage": "failed", "problem": "no torch"}
            return {"stage": "here", "gpus": self._gpus, "port": 5000 + number}
        return []

    def _run(self, group: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
        bad = [name for name in group["members"] if name in self._problems]
        answers = {
            name: {"stage": "hangs", "after": "here"} if bad else FIGURES
            for name in group["members"]
        }
        for name in bad:
            if self._problems[name] == "fails":
                answers[name] = {"stage": "failed", "problem": "no such interface"}
        return list(answers.items())


def measured(nodes: Played, **options: Any) -> NetworkMeasurements:
    """Return the measurements of a check of the nodes."""
    return Check(nodes, Options(**{"all_reduce": 30.0, **options}), lambda *_: None).run()  # type: ignore[arg-type]


def test_the_bus_bandwidth_is_that_of_nccl_tests() -> None:
    # nccl-tests, PERFORMANCE.md: B = S/t * 2*(n-1)/n.
    assert bus_bandwidth(1_000_000, 0.001, 2) == pytest.approx(1e9)
    assert bus_bandwidth(1_000_000, 0.001, 4) == pytest.approx(1.5e9)


def test_all_nodes_take_part_and_figures_are_reported() -> None:
    nodes = Played(4)
    found = measured(nodes)
    assert findings(found) == []
    assert found.collective == Collective(tuple(nodes.live), "gloo", 4, 4 * MIB, 0.01, BUSBW)
    assert collective_line(found.collective) == (
        "all-reduce over 4 nodes (gloo, 4 ranks): 4 MiB in 10 ms, busbw 0.629 GB/s"
    )
    assert as_data(found, [])["collective"]["busbw_bytes_per_second"] == BUSBW
    ((order,),) = nodes.groups
    assert (order["address"], order["port"]) == ("10.0.0.0", 5000)
    assert order["members"] == {"n0": (0, 1), "n1": (1, 1), "n2": (2, 1), "n3": (3, 1)}


def test_every_gpu_has_a_rank() -> None:
    nodes = Played(3, gpus=8)
    seen = measured(nodes).collective
    assert seen is not None
    assert (seen.backend, seen.ranks) == ("nccl", 24)
    assert nodes.groups[0][0]["members"] == {"n0": (0, 8), "n1": (8, 8), "n2": (16, 8)}


def test_no_all_reduce_is_asked_for_with_0() -> None:
    nodes = Played(4)
    assert measured(nodes, all_reduce=0.0).collective is None
    assert nodes.groups == []


@pytest.mark.parametrize("count", [3, 8, 13])
@pytest.mark.parametrize(
    ("problem", "words"),
    [("hangs", "no result after 3"), ("fails", "no such interface"), ("no torch", "no torch")],
)
def test_the_node_with_which_it_fails_is_isolated(count: int, problem: str, words: str) -> None:
    found = measured(Played(count, n2=problem))
    (finding,) = findings(found)
    assert (finding.check, finding.nodes) == ("collective", ("n2",))
    assert words in finding.text
    assert "GLOO_SOCKET_IFNAME" in finding.text
    assert found.collective is not None
    assert words in collective_line(found.collective)


def test_a_failure_of_two_nodes_is_that_of_both() -> None:
    (finding,) = findings(measured(Played(2, n1="hangs")))
    assert (finding.check, finding.nodes) == ("collective", ())
    assert "over 2 nodes" in finding.text


class Groups:
    """Nodes; each group with a ``bad`` node fails, or with all nodes of a ``bad`` link."""

    def __init__(self, *bad: set[str]) -> None:
        self.bad, self.steps = bad, 0

    def works(self, groups: Sequence[Sequence[str]]) -> list[bool]:
        """Return which groups work; they share no node, and have at least two nodes."""
        busy = [node for group in groups for node in group]
        assert len(busy) == len(set(busy))
        assert all(len(group) > 1 for group in groups)
        self.steps += 1
        return [not any(bad <= set(group) for bad in self.bad) for group in groups]


def names(count: int) -> list[str]:
    """Return the names of some nodes."""
    return [f"n{number}" for number in range(count)]


@pytest.mark.parametrize("count", [3, 5, 8, 13, 1000])
def test_bad_nodes_are_found_in_four_rounds(count: int) -> None:
    fleet = names(count)
    for bad in ([fleet[0]], [fleet[-1]], *([] if count < 5 else [fleet[:2], fleet[1:4:2]])):
        groups = Groups(*({node} for node in bad))
        assert isolate(fleet, groups.works) == bad
        assert groups.steps <= 4


def test_where_nothing_works_all_nodes_are_named() -> None:
    for count in (2, 8):
        assert isolate(names(count), Groups(*({node} for node in names(count))).works) == names(
            count
        )


@pytest.mark.parametrize("bad", [[{"n1", "n6"}], []])
def test_a_fault_between_nodes_blames_no_node(bad: list[set[str]]) -> None:
    assert isolate(names(8), Groups(*bad).works) == []


def test_a_silent_end_of_a_rank_differs_from_a_hang(tmp_path: Path) -> None:
    def node_of(code: str) -> NodeRanks:
        return NodeRanks((sys.executable, "-c", code))

    node = node_of("import sys; sys.exit('no module named torch')")
    assert node.prepare() == {"stage": "failed", "problem": "no module named torch", "after": None}
    here = 'print(\'{"stage": "here", "gpus": 3, "port": 1}\', flush=True);'
    note = f"import os, pathlib, time; pathlib.Path({str(tmp_path)!r}, str(os.getpid())).touch();"
    node = node_of(f"{note} {here} time.sleep(600)")
    assert node.prepare()["gpus"] == 3
    started = [path.name for path in tmp_path.iterdir()]
    assert len(started) == 3
    assert node.run({"limit": 0.1}, 0, 3) == {"stage": "hangs", "after": "here"}
    assert not any(Path("/proc", process).exists() for process in started)
