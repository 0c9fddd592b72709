"""The ports of rank 0: a closed port is found, and the finding names the node that closes it."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from hpcrun.network.agents import AGENT, Processes, start
from hpcrun.network.findings import findings
from hpcrun.network.links import Links
from hpcrun.network.measurements import NetworkMeasurements, PortCheck
from hpcrun.network.netcheck import Check, Options
from hpcrun.network.rank_zero_ports import check_ports, port_findings, tried_ports
from hpcrun.ranks.addresses import ephemeral_range, port_candidates
from tests.support import jobs

from .two_hosts import HOSTS, two_hosts

TRIED = (10000, 12000, 20000, 32767)


def test_the_ports_are_those_that_rank_0_would_choose() -> None:
    ports = tried_ports({}, "7")
    low, _ = ephemeral_range()
    assert set(port_candidates("7", 32)[:6]) <= set(ports)
    assert max(ports) < max(low, 65536)
    assert tried_ports({"MASTER_PORT": "12355"}, "7") == [12355]
    assert tried_ports({"MASTER_PORT": "none"}, "7") == ports


class Threads:
    """Nodes of this process. ``closed``: the nodes that close each second port before the others try them."""

    def __init__(self, *names: str, closed: Sequence[str] = ()) -> None:
        self.live, self._closed = list(names), closed
        self._links = {name: Links(name) for name in names}
        for links in self._links.values():
            links.meet([{"name": one, "address": "127.0.0.1"} for one in names], "secret")

    def ask(
        self, what: str, _: float, nodes: Any = None, /, *, lose: bool = True, **order: Any
    ) -> Any:
        found = {
            name: getattr(self._links[name], what)(**order) for name in self.live if name in nodes
        }
        if what == "hold":
            (name,) = found
            if name in self._closed:
                self._links[name].release()
                self._links[name].hold(found[name][::2])
        return found


def test_a_closed_port_is_found_over_real_connections() -> None:
    ports = []
    for _ in range(4):
        with socket.create_server(("127.0.0.1", 0)) as free:
            ports.append(free.getsockname()[1])
    checks = check_ports(Threads("n1", "n2", "n3"), ports)  # type: ignore[arg-type]
    assert [(one.node, one.target, one.failed) for one in checks] == [
        ("n2", "n1", []),
        ("n3", "n1", []),
    ]
    assert port_findings(checks) == []
    checks = check_ports(Threads("n1", "n2", "n3", closed=["n1"]), ports)  # type: ignore[arg-type]
    # The node in the place of the first is tried too.
    assert [one.target for one in checks] == ["n1", "n1", "n2", "n2"]
    tried = checks[0].tried
    assert {tuple(one.refused) for one in checks if one.target == "n1"} == {tried[1::2]}
    (found,) = port_findings(checks)
    assert (found.check, found.nodes, found.status) == ("closed port", ("n1",), "fail")
    assert f"({len(tried) // 2} of {len(tried)} tried) are refused" in found.words
    checks = check_ports(Threads("n1", "n2", closed=["n1", "n2"]), ports)  # type: ignore[arg-type]
    (found,) = port_findings(checks)
    assert found.nodes == ()


def check(node: str, target: str, *closed: int) -> PortCheck:
    return PortCheck(node, target, TRIED, (), closed)


def test_the_finding_names_who_is_at_fault() -> None:
    def named(*checks: PortCheck) -> list[tuple[tuple[str, ...], str]]:
        return [(one.nodes, one.words) for one in port_findings(checks)]

    assert named(check("b", "a"), check("c", "a")) == []
    # One node of three cannot connect: its own firewall.
    assert named(check("b", "a"), check("c", "a", 12000), check("d", "a")) == [
        (("c",), "cannot connect to port 12000 (1 of 4 tried) of a")
    ]
    at_a = (check("b", "a", *TRIED[:3]), check("c", "a", *TRIED[:3]))
    ((nodes, words),) = named(*at_a, check("a", "b"), check("c", "b"))
    assert nodes == ("a",)
    assert words == "connections to ports 10000 to 20000 (3 of 4 tried) are dropped"
    ((nodes, words),) = named(*at_a, check("a", "b", *TRIED[:3]), check("c", "b", *TRIED[:3]))
    assert nodes == ()
    assert words.startswith("between them, connections to ports 10000 to 20000")
    # A node that is silent or slow has its own finding.
    measured = NetworkMeasurements(["a", "b", "c"], {"a": "did not start"}, ports=list(at_a))
    assert [one.check for one in findings(measured)] == ["silent"]


def test_a_firewall_between_two_hosts_is_found() -> None:
    if shutil.which("nft") is None:
        pytest.skip("a packet filter needs nft")
    with two_hosts((None, None)) as prefixes:

        def begin(names: Sequence[str]) -> Processes:
            return Processes(
                [
                    ([*prefix, sys.executable, *AGENT], os.environ | {"HPCRUN_CHECK_NAME": name})
                    for name, prefix in zip(names, prefixes, strict=True)
                ]
            )

        def report() -> NetworkMeasurements:
            nodes = start(begin, HOSTS, jobs.PATIENCE)
            try:
                return Check(nodes, Options(seconds=0.2, streams=1), lambda *_: None).run()
            finally:
                nodes.close()

        assert [one for one in findings(report()) if one.check == "closed port"] == []
        low, _ = ephemeral_range()
        rule = f"tcp dport 10000-{low - 1} reject with tcp reset"
        table = f"table inet t {{ chain c {{ type filter hook input priority 0; {rule}; }}; }}"
        subprocess.run([*prefixes[0], "nft", "-f", "-"], input=table, text=True, check=True)
        (found,) = [one for one in findings(report()) if one.check == "closed port"]
        assert found.nodes == (HOSTS[0],)
        assert "10000 to " in found.words
        assert "are refused" in found.words
        assert "MASTER_PORT" in found.remedy
