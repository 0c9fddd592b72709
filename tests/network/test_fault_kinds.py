"""Each kind of fault of a network, on measurements of 3 to 16 nodes: its finding, and no other."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from hpcrun.network.agents import Nodes
from hpcrun.network.faults.node_network import read_network, wrong_variables
from hpcrun.network.findings import excluded, findings
from hpcrun.network.measurements import (
    NameCheck,
    NetworkMeasurements,
    NodeNetwork,
    PortCheck,
    Transfer,
    all_pairs,
)

Way = Callable[[str, str], Any]


def fleet(
    count: int,
    *,
    rate: Way = lambda *_: 10e9,
    lost: Way = lambda *_: 0.0,
    trip: Way = lambda *_: 1e-4,
    refused: bool = False,
    again: Sequence[tuple[str, ...]] = (),
    **facts: Any,
) -> NetworkMeasurements:
    """Return measurements; ``again``: suspects that are measured again, with the same result."""
    dice, nodes = random.Random(count), [f"n{number}" for number in range(count)]
    measured = NetworkMeasurements(nodes, **facts)
    for pair in itertools.chain(*all_pairs(nodes)):
        for a, b in (pair, pair[::-1]):
            noise = dice.uniform(0.66, 1.1)
            value = None if (usual := rate(a, b)) is None else usual * noise
            subjects = [(), *(one for one in again if set(one) <= {a, b})]
            measured.transfers += [
                Transfer(a, b, value, refused and value is None, lost(a, b), subject)
                for subject in subjects
            ]
            seconds = trip(a, b) * dice.uniform(1, 2)
            measured.names.append(NameCheck(a, b, "10.0.0.1", 3 * seconds, least=seconds))
    return measured


def kinds(measured: NetworkMeasurements) -> list[str]:
    """Return check and nodes of each finding."""
    return [" ".join((one.check, *one.nodes)) for one in findings(measured)]


def between(*nodes: str) -> Callable[[str, str], bool]:
    """Return a test for the links between two of ``nodes``, both directions."""
    return lambda a, b: {a, b} <= {*nodes}


def touches(*nodes: str) -> Callable[[str, str], bool]:
    """Return a test for the links of any of ``nodes``."""
    return lambda a, b: bool({a, b} & {*nodes})


def one_way(a: str, b: str) -> bool:
    """Return True for one direction of the pair."""
    return (a, b) == ("n1", "n2")


def every(*_: str) -> bool:
    """Return True for every link."""
    return True


def either(bad: Callable[[str, str], bool], low: Any, usual: Any) -> Way:
    """Return ``low`` for bad links, else ``usual``."""
    return lambda a, b: low if bad(a, b) else usual


HALF_OF_8 = touches("n4", "n5", "n6", "n7")
PAIR, NODE, HALF = between("n1", "n2"), touches("n1"), touches("n2", "n3")
MANY, SOME = (3, 4, 9), (4, 8)
AGAIN = [("n1", "n2"), ("n1",), ("n2",), ("n3",)]


@pytest.mark.parametrize(
    ("counts", "options", "expected", "words"),
    [
        (MANY, {}, [], ""),
        (MANY, {"rate": either(PAIR, None, 1e9)}, ["unreachable n1 n2"], "both directions"),
        (MANY, {"rate": either(one_way, None, 1e9)}, ["unreachable n1 n2"], "from n1 to n2"),
        ((2,), {"rate": either(every, None, 1e9)}, ["unreachable n0 n1"], "both directions"),
        (SOME, {"rate": either(PAIR, None, 1e9), "refused": True}, ["unreachable n1 n2"], "are refused"),
        (MANY, {"rate": either(NODE, None, 1e9)}, ["unreachable n1"], "connections to it fail"),
        (MANY, {"lost": either(NODE, 0.01, 0.0)}, ["loss n1"], "1.0% sent again"),
        (SOME, {"lost": either(PAIR, 0.02, 0.0)}, ["loss n1 n2"], "2.0% sent again"),
        (SOME, {"lost": either(one_way, 0.02, 0.0)}, ["loss n1 n2"], "2.0% sent again"),
        ((4,), {"lost": either(HALF, 0.01, 0.0)}, ["loss n2", "loss n3"], "its links"),
        (MANY, {"lost": either(every, 0.02, 0.0)}, ["loss"], "all links lose"),
        (MANY, {"lost": either(every, 0.002, 0.0)}, [], ""),
        (MANY, {"trip": either(NODE, 0.02, 1e-4)}, ["latency n1"], "round trips are long"),
        (SOME, {"trip": either(PAIR, 0.02, 1e-4)}, ["latency n1 n2"], "round trip is long"),
        (MANY, {"trip": either(every, 0.02, 0.0)}, ["latency"], "all round trips"),
        (MANY, {"trip": either(NODE, 4e-4, 1e-4)}, [], ""),
        ((4,), {"rate": either(HALF, 5e7, 1e10)}, ["slow n2", "slow n3"], "two groups"),
        ((8,), {"rate": either(HALF_OF_8, 5e7, 1e10)}, [f"slow n{n}" for n in (4, 5, 6, 7)], "two groups"),
        ((4, 8), {"rate": either(NODE, 0.0, 1e10)}, ["mtu n1"], "large packets"),
        ((8,), {"rate": either(PAIR, 0.0, 1e10)}, ["mtu n1 n2"], "large packets"),
        (MANY, {"rate": either(every, 0.0, 1e10)}, ["mtu"], "large packets"),
        ((8,), {"rate": either(NODE, 5e7, 1e10), "lost": either(NODE, 0.2, 0.0)}, ["slow n1"], "20.0%"),
        # A long way makes rates low, and is the cause.
        ((8,), {"rate": either(NODE, 1e9, 1e10), "trip": either(NODE, 0.02, 1e-4)}, ["latency n1"], "long"),
    ],
)  # fmt: skip
def test_each_kind_is_named_at_its_place(
    counts: Sequence[int], options: dict[str, Any], expected: list[str], words: str
) -> None:
    for count, again in itertools.product(counts, ((), AGAIN)):
        measured = fleet(count, again=again, **options)
        assert kinds(measured) == expected, (count, again)
        assert all(words in one.text for one in findings(measured)), findings(measured)


def test_what_does_not_repeat_has_no_finding() -> None:
    gap = fleet(4, rate=either(PAIR, None, 1e10))
    gap.transfers += [
        Transfer(a, b, 1e9, again_for=("n1", "n2")) for a, b in (("n1", "n2"), ("n2", "n1"))
    ]
    assert kinds(gap) == []
    loss = fleet(8, lost=either(PAIR, 0.02, 0.0))
    loss.transfers.append(Transfer("n1", "n2", 1e10, lost=0.0, again_for=("n1", "n2")))
    assert kinds(loss) == []


def test_a_gap_explains_closed_ports_of_its_nodes() -> None:
    ports = [PortCheck("n2", "n1", (10000,), unreachable=(10000,)), PortCheck("n0", "n1", (10000,))]
    assert kinds(fleet(4, rate=either(PAIR, None, 1e9), ports=ports)) == ["unreachable n1 n2"]


@pytest.mark.parametrize(
    ("networks", "expected"),
    [
        (
            {"n1": NodeNetwork("b", has_address_of=["n2"]), "n2": NodeNetwork("c")},
            ["address n1 n2"],
        ),
        ({"n1": NodeNetwork("b", has_address_of=["n2"]), "n2": NodeNetwork("b")}, []),
        ({"n1": NodeNetwork(loopback_name=True)}, ["name n1"]),
        ({f"n{number}": NodeNetwork(loopback_name=True) for number in range(4)}, []),
        ({"n3": NodeNetwork(interface="eth0", half_duplex=True)}, ["duplex n3"]),
        (
            {"n2": NodeNetwork(wrong_variables=["GLOO_SOCKET_IFNAME=x names none"])},
            ["interface n2"],
        ),
        (
            {f"n{n}": NodeNetwork(wrong_variables=["a names none"]) for n in range(4)},
            ["interface"],
        ),
    ],
)
def test_what_nodes_report_of_themselves(
    networks: dict[str, NodeNetwork], expected: list[str]
) -> None:
    known = {f"n{number}": NodeNetwork(str(number)) for number in range(4)} | networks
    # Nothing else is sure about two nodes with one address.
    low = (
        either(touches("n1"), 5e7, 1e10) if "address n1 n2" in expected else either(every, 1e10, 0)
    )
    assert kinds(fleet(4, networks=known, rate=low)) == expected


@pytest.mark.parametrize(
    ("rate", "speed", "own", "expected"),
    [
        (5e7, 10_000, 4e9, ["slow"]),
        (9e7, 1000, 4e9, ["slow"]),
        (9.4e7, 100, 4e9, []),
        (1e9, 10_000, 4e9, []),
        (3e8, 10_000, 1e9, []),
        (5e7, None, 4e9, []),
        (2e10, 400_000, 4e10, []),
    ],
)
def test_all_links_below_their_hardware(
    rate: float, speed: int | None, own: float, expected: list[str]
) -> None:
    nodes = [f"n{number}" for number in range(4)]
    networks = {node: NodeNetwork(node, "eth0", speed) for node in nodes}
    measured = fleet(4, rate=lambda *_: rate, networks=networks, loopback=dict.fromkeys(nodes, own))
    assert kinds(measured) == expected
    assert excluded(findings(measured)) == []


def test_the_end_of_srun_has_its_words() -> None:
    aborted = NetworkMeasurements(["a", "b"], ended=True, ending="srun: Job step aborted")
    (found,) = findings(aborted)
    assert "srun: Job step aborted" in found.text
    assert "--no-kill" not in found.text
    aborted.ending = "slurmstepd: error: *** JOB 7 ON a CANCELLED AT 10:00 DUE TO NODE FAILURE ***"
    assert "--no-kill" in findings(aborted)[0].text


class Ended:
    """Processes that have ended without an answer."""

    def hear(self, timeout: float) -> None:
        """Return no answer."""

    def ended(self) -> bool:
        """Return True."""
        return True

    def join(self) -> None:
        """Wait for nothing."""


def test_a_node_that_srun_left_did_not_wait_120_seconds() -> None:
    nodes = Nodes(Ended(), ["a", "b"])  # type: ignore[arg-type]
    nodes.meet(120)
    assert nodes.silent == dict.fromkeys("ab", "srun ended before a task started there")


def test_variables_that_name_no_interface() -> None:
    def wrong(**environ: str) -> list[str]:
        return [one.partition("=")[0] for one in wrong_variables(environ, ["eth0", "ib0"])]

    assert wrong() == wrong(GLOO_SOCKET_IFNAME="eth0,ib0", NCCL_SOCKET_IFNAME="^lo,docker") == []
    assert wrong(GLOO_SOCKET_IFNAME="eth") == ["GLOO_SOCKET_IFNAME"]
    assert wrong(GLOO_SOCKET_IFNAME="lo", NCCL_SOCKET_IFNAME="=eth") == [
        *("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    ]


def test_the_facts_of_a_node_come_from_its_files(tmp_path: Path) -> None:
    # On one machine, the agents have loopback addresses, and no interface.
    found = read_network(
        {"a": "127.0.0.1", "b": "127.0.0.2"}, "a", tmp_path, {"GLOO_SOCKET_IFNAME": "x"}
    )
    assert (found["interface"], found["speed"], found["wrong_variables"]) == (None, None, [])
