"""The finding on fleets with planted faults and noise: it names each fault, and nothing else."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from hpcrun.network.faults.rates import slow_parts
from hpcrun.network.findings import (
    as_data,
    conclusion,
    excluded,
    findings,
    node_lines,
)
from hpcrun.network.measurements import (
    NameCheck,
    NetworkMeasurements,
    Transfer,
    all_pairs,
    rounds_for,
    scores,
)
from hpcrun.network.probes import Finding, findings_of
from hpcrun.ports.node_checks import Same

SEEDS = range(10)
Rate = Callable[[str, str, random.Random], float | None]


def names(count: int) -> list[str]:
    """The names of a fleet."""
    return [f"n{number}" for number in range(count)]


def usual(sender: str, receiver: str, dice: random.Random) -> float:
    """Return a rate of a busy machine: 10 Gbit/s, sometimes two thirds of it."""
    return 10e9 * dice.uniform(0.66, 1.1)


def fleet(count: int, seed: int, rate: Rate, **facts: Any) -> NetworkMeasurements:
    """Return the measurements of ``count`` nodes; ``rate`` gives None for a failed connection."""
    dice, nodes = random.Random(seed), names(count)
    measured = NetworkMeasurements(nodes, **facts)
    for pairs in rounds_for(nodes):
        for a, b in pairs:
            for sender, receiver in ((a, b), (b, a)):
                found = rate(sender, receiver, dice)
                refused = found is None
                measured.transfers.append(Transfer(sender, receiver, found, refused, 0.002))
    return measured


def kinds(found: list[Finding]) -> list[tuple[str, tuple[str, ...]]]:
    """Return kind and nodes of each finding."""
    return [(one.check, one.nodes) for one in found]


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8, 16, 100])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_clean_fleet_has_no_finding(count: int, seed: int) -> None:
    assert findings(fleet(count, seed, usual)) == []


ALL, LINKS = (3, 4, 8, 16, 100), (4, 8, 16)
"""Numbers of nodes; above 64 nodes, not every pair meets."""


@pytest.mark.parametrize(
    ("counts", "low", "bad", "expected", "words"),
    [
        (ALL, 48e6, lambda a, b: "n1" in (a, b), ["slow n1"], "all its links are slow: 48 Mbit/s"),
        (ALL, 48e6, lambda _, b: b == "n1", ["slow n1"], "only receiving is slow: 48 Mbit/s"),
        ((8, 16), 1e9, lambda a, b: {"n1", "n6"} & {a, b}, ["slow n1", "slow n6"], "1 Gbit/s"),
        (LINKS, 48e6, lambda a, b: {a, b} == {"n1", "n3"}, ["link n1 n3"], "but not its nodes"),
        (LINKS, 48e6, lambda a, b: (a, b) == ("n1", "n3"), ["link n1 n3"], "only from n1 to n3"),
        (ALL, None, lambda _, b: b == "n1", ["refuses n1"], "firewall"),
    ],
)
def test_a_planted_fault_is_named_and_nothing_else(
    counts: tuple[int, ...], low: float | None, bad: Any, expected: list[str], words: str
) -> None:
    for count, seed in itertools.product(counts, SEEDS):
        measured = fleet(count, seed, lambda a, b, dice: low if bad(a, b) else usual(a, b, dice))
        found = findings(measured)
        assert [" ".join((one.check, *one.nodes)) for one in found] == expected, (count, seed)
        assert words in found[0].text
        assert len(excluded(found)) == len(expected)


def test_an_mtu_that_differs_is_named() -> None:
    def probed(**mtus: str) -> list[Finding]:
        return findings_of(
            {node: [("mtu", Same("MTU", mtu, "set it"))] for node, mtu in mtus.items()}
        )

    assert findings(fleet(4, 1, usual, probed=probed(n0="9000", n1="9000", n2="9000"))) == []
    (found,) = findings(fleet(4, 1, usual, probed=probed(n0="1500", n1="1500", n2="576")))
    assert (found.check, found.nodes) == ("mtu", ("n2",))
    assert found.text == "MTU is 576, on most nodes 1500; set it"


@pytest.mark.parametrize("count", [3, 4, 8])
def test_a_node_without_a_link_is_named_without_peers(count: int) -> None:
    measured = fleet(count, 1, usual)
    measured.transfers = [
        Transfer(one.sender, one.receiver, None) if "n1" in (one.sender, one.receiver) else one
        for one in measured.transfers
    ]
    assert kinds(findings(measured)) == [("unreachable", ("n1",))]


def test_a_suspect_that_is_fast_alone_has_no_finding() -> None:
    def rate(sender: str, receiver: str, dice: random.Random) -> float:
        return 1e9 if "n2" in (sender, receiver) else usual(sender, receiver, dice)

    measured = fleet(4, 1, rate)
    assert slow_parts(measured.transfers).nodes == ("n2",)
    again = [
        Transfer("n2", "n0", 9e9, again_for=("n2",)),
        Transfer("n0", "n2", 9e9, again_for=("n2",)),
    ]
    measured.transfers += again
    assert findings(measured) == []
    measured.transfers[-2:] = [Transfer("n2", "n0", 1e9, again_for=("n2",))]
    assert kinds(findings(measured)) == [("slow", ("n2",))]
    assert scores(measured.transfers)["n0"] == pytest.approx(1, rel=0.4)


def test_a_link_that_is_fast_alone_has_no_finding() -> None:
    def rate(sender: str, receiver: str, dice: random.Random) -> float:
        return 1e9 if {sender, receiver} == {"n2", "n5"} else usual(sender, receiver, dice)

    measured = fleet(8, 1, rate)
    assert slow_parts(measured.transfers).links == (("n2", "n5"),)
    measured.transfers.append(Transfer("n2", "n5", 9e9, again_for=("n2", "n5")))
    assert findings(measured) == []


def name_check(resolver: str, target: str, problem: Any = None) -> NameCheck:
    """Return the check of a name, with a failure if ``problem`` is set."""
    seconds = None if problem else 1e-4
    return NameCheck(resolver, target, "10.0.0.9", seconds, problem)


def test_a_wrong_entry_blames_the_node_that_has_it() -> None:
    nodes = names(4)
    checks = [name_check(a, b) for a in nodes for b in nodes if a != b and (a, b) != ("n3", "n0")]
    measured = fleet(4, 1, usual, names=[*checks, name_check("n3", "n0", "wrong")])
    (found,) = findings(measured)
    assert (found.check, found.nodes) == ("name", ("n3",))
    assert "n0 resolves to 10.0.0.9" in found.text


def test_a_name_wrong_everywhere_blames_the_name() -> None:
    nodes = names(4)
    checks = [
        name_check(a, b, "unresolved" if b == "n2" else None)
        for a in nodes
        for b in nodes
        if a != b
    ]
    (found,) = findings(fleet(4, 1, usual, names=checks))
    assert (found.check, found.nodes) == ("name", ("n2",))
    assert "does not resolve on 3 nodes" in found.text


def test_a_firewall_is_no_wrong_name() -> None:
    checks = [name_check(a, "n1", "refused") for a in ("n0", "n2", "n3")]
    assert findings(fleet(4, 1, usual, names=checks)) == []


@pytest.mark.parametrize("count", [3, 4, 8])
@pytest.mark.parametrize(("refused", "kind"), [(True, "refuses"), (False, "unreachable")])
def test_nodes_that_all_close_their_ports_are_one_finding(
    count: int, refused: bool, kind: str
) -> None:
    nodes = names(count)
    failed = [Transfer(a, b, None, refused=refused) for a in nodes for b in nodes if a != b]
    found = findings(NetworkMeasurements(nodes, transfers=failed))
    assert kinds(found) == [(kind, ())]
    assert excluded(found) == []
    assert conclusion(found) == [f"all nodes: {found[0].text}"]


def test_of_each_bad_link_one_node_is_excluded() -> None:
    links = [Finding("link", pair, "fail", "") for pair in (("a", "b"), ("b", "c"), ("d", "e"))]
    assert len(excluded(links)) == 2
    assert "b" in excluded(links)
    assert excluded([*links, Finding("slow", ("d",), "fail", "")]) == ["b", "d"]


def test_the_report_is_json_and_lines() -> None:
    measured = fleet(4, 1, lambda a, b, dice: 5e7 if "n2" in (a, b) else usual(a, b, dice))
    measured.names = [name_check("n0", "n1")]
    found = findings(measured)
    data = json.loads(json.dumps(as_data(measured, found)))
    assert data["exclude"] == ["n2"]
    assert data["nodes"][2]["score"] < 0.1
    assert len(data["transfers"]) == 12
    lines = node_lines(measured)
    assert lines[3].split()[:3] == ["n2", "50", "Mbit/s"]
    assert lines[1].split()[-3:] == ["0.2%", "100", "µs"]
    assert conclusion(found)[-1] == "--exclude=n2"
    assert conclusion([]) == ["nothing is wrong"]


@pytest.mark.parametrize("count", [0, 1, 2, 5, 8, 33])
def test_every_pair_meets_once(count: int) -> None:
    rounds = all_pairs(names(count))
    for pairs in rounds:
        busy = [node for pair in pairs for node in pair]
        assert len(busy) == len(set(busy))
        assert len(pairs) == count // 2
    met = [frozenset(pair) for pairs in rounds for pair in pairs]
    assert len(met) == len(set(met)) == count * (count - 1) // 2


@pytest.mark.parametrize("count", [65, 1000])
def test_above_64_nodes_random_matchings_take_their_place(count: int) -> None:
    rounds = rounds_for(names(count))
    assert len(rounds) == 10
    for pairs in rounds:
        busy = [node for pair in pairs for node in pair]
        assert len(busy) == len(set(busy)) == count - count % 2
    assert rounds == rounds_for(names(count))
    assert len(rounds_for(names(64))) == 63
