"""The verdict, on fleets with planted faults and noise: the fault is named each time, nothing else ever."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from hpcrun.network.check.measured import Measured, NameCheck, Transfer
from hpcrun.network.check.report import as_data, node_lines, verdict_lines
from hpcrun.network.check.schedule import rounds_for
from hpcrun.network.check.statistics import node_rates, scores, usual_rate
from hpcrun.network.check.verdict import Verdict, excluded, rate_text, suspects, verdicts

SEEDS = range(20)
Rate = Callable[[str, str, random.Random], float | None]


def names(count: int) -> list[str]:
    """The names of a fleet."""
    return [f"n{number}" for number in range(count)]


def usual(sender: str, receiver: str, dice: random.Random) -> float:
    """A rate as a busy machine gives it: 10 Gbit/s, sometimes two thirds of it."""
    return 10e9 * dice.uniform(0.66, 1.1)


def fleet(count: int, seed: int, rate: Rate, **facts: Any) -> Measured:
    """What a check of ``count`` nodes sees; ``rate`` gives None for a connection that fails."""
    dice, nodes = random.Random(seed), names(count)
    measured = Measured(nodes, **facts)
    for pairs in rounds_for(count, seed):
        for a, b in pairs:
            for sender, receiver in ((nodes[a], nodes[b]), (nodes[b], nodes[a])):
                found = rate(sender, receiver, dice)
                refused = found is None
                measured.transfers.append(Transfer(sender, receiver, found, refused=refused))
    return measured


def kinds(found: list[Verdict]) -> list[tuple[str, tuple[str, ...]]]:
    """Kind and nodes of each verdict."""
    return [(one.kind, one.nodes) for one in found]


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8, 16, 100])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_clean_fleet_has_no_verdict(count: int, seed: int) -> None:
    assert verdicts(fleet(count, seed, usual)) == []


@pytest.mark.parametrize("count", [3, 4, 8, 16, 100])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_slow_node_is_named_and_nothing_else(count: int, seed: int) -> None:
    bad = names(count)[seed % count]

    def rate(sender: str, receiver: str, dice: random.Random) -> float:
        return 48e6 if bad in (sender, receiver) else usual(sender, receiver, dice)

    found = verdicts(fleet(count, seed, rate))
    assert kinds(found) == [("slow", (bad,))]
    assert "48 Mbit/s" in found[0].text
    assert excluded(found) == [bad]


@pytest.mark.parametrize("count", [4, 8, 16])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_slow_link_is_a_link_and_not_a_node(count: int, seed: int) -> None:
    pair = {f"n{seed % count}", f"n{(seed + 1) % count}"}

    def rate(sender: str, receiver: str, dice: random.Random) -> float:
        return 48e6 if {sender, receiver} == pair else usual(sender, receiver, dice)

    found = verdicts(fleet(count, seed, rate))
    assert kinds(found) == [("link", tuple(sorted(pair)))]
    assert len(excluded(found)) == 1


@pytest.mark.parametrize("count", [4, 8, 16])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_node_that_is_slow_in_one_direction_is_named(count: int, seed: int) -> None:
    def rate(sender: str, receiver: str, dice: random.Random) -> float:
        return 48e6 if receiver == "n1" else usual(sender, receiver, dice)

    assert kinds(verdicts(fleet(count, seed, rate))) == [("slow", ("n1",))]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_link_that_is_slow_in_one_direction_is_named(seed: int) -> None:
    def rate(sender: str, receiver: str, dice: random.Random) -> float:
        return 48e6 if (sender, receiver) == ("n1", "n3") else usual(sender, receiver, dice)

    measured = fleet(4, seed, rate)
    measured.transfers += [
        Transfer("n1", "n3", 48e6, again_for=("n1", "n3")),
        Transfer("n3", "n1", 9e9, again_for=("n1", "n3")),
    ]
    assert kinds(verdicts(measured)) == [("link", ("n1", "n3"))]


def test_two_slow_nodes_of_eight_are_both_named() -> None:
    def rate(sender: str, receiver: str, dice: random.Random) -> float:
        slow = {"n1", "n6"}.intersection((sender, receiver))
        return 1e9 if slow else usual(sender, receiver, dice)

    assert kinds(verdicts(fleet(8, 1, rate))) == [("slow", ("n1",)), ("slow", ("n6",))]


def test_a_node_that_drops_packets_differs_from_a_slow_node() -> None:
    measured = fleet(4, 1, usual)
    measured.transfers = [
        Transfer(one.sender, one.receiver, 20e6, lost=0.22)
        if "n2" in (one.sender, one.receiver)
        else one
        for one in measured.transfers
    ]
    (found,) = verdicts(measured)
    assert (found.kind, found.nodes) == ("lossy", ("n2",))
    assert "22% sent again" in found.text


@pytest.mark.parametrize("count", [3, 4, 8])
def test_a_node_that_refuses_is_named_and_its_peers_are_not(count: int) -> None:
    def rate(sender: str, receiver: str, dice: random.Random) -> float | None:
        return None if receiver == "n1" else usual(sender, receiver, dice)

    assert kinds(verdicts(fleet(count, 1, rate))) == [("refuses", ("n1",))]


@pytest.mark.parametrize("count", [3, 4, 8])
def test_a_node_without_a_link_is_named_and_its_peers_are_not(count: int) -> None:
    measured = fleet(count, 1, usual)
    measured.transfers = [
        Transfer(one.sender, one.receiver, None) if "n1" in (one.sender, one.receiver) else one
        for one in measured.transfers
    ]
    assert kinds(verdicts(measured)) == [("unreachable", ("n1",))]


def test_a_suspect_that_is_fast_when_alone_has_no_verdict() -> None:
    def rate(sender: str, receiver: str, dice: random.Random) -> float:
        return 1e9 if "n2" in (sender, receiver) else usual(sender, receiver, dice)

    measured = fleet(4, 1, rate)
    assert suspects(measured.transfers).nodes == ("n2",)
    again = [
        Transfer("n2", "n0", 9e9, again_for=("n2",)),
        Transfer("n0", "n2", 9e9, again_for=("n2",)),
    ]
    measured.transfers += again
    assert verdicts(measured) == []
    measured.transfers[-2:] = [Transfer("n2", "n0", 1e9, again_for=("n2",))]
    assert kinds(verdicts(measured)) == [("slow", ("n2",))]
    assert scores(measured.transfers)["n0"] == pytest.approx(1, rel=0.4)


def test_a_link_that_is_fast_when_alone_has_no_verdict() -> None:
    def rate(sender: str, receiver: str, dice: random.Random) -> float:
        return 1e9 if {sender, receiver} == {"n2", "n5"} else usual(sender, receiver, dice)

    measured = fleet(8, 1, rate)
    assert suspects(measured.transfers).links == (("n2", "n5"),)
    measured.transfers.append(Transfer("n2", "n5", 9e9, again_for=("n2", "n5")))
    assert verdicts(measured) == []


def test_silent_nodes_are_verdicts() -> None:
    measured = fleet(4, 1, usual, silent={"n3": "its task did not start"})
    assert kinds(verdicts(measured)) == [("silent", ("n3",))]


def name_check(resolver: str, target: str, problem: Any = None) -> NameCheck:
    """A look at a name that goes wrong where ``problem`` says so."""
    seconds = None if problem else 1e-4
    return NameCheck(resolver, target, "10.0.0.9", seconds, problem)


def test_one_wrong_entry_is_the_fault_of_the_node_that_has_it() -> None:
    nodes = names(4)
    checks = [name_check(a, b) for a in nodes for b in nodes if a != b and (a, b) != ("n3", "n0")]
    measured = fleet(4, 1, usual, names=[*checks, name_check("n3", "n0", "wrong")])
    (found,) = verdicts(measured)
    assert (found.kind, found.nodes) == ("name", ("n3",))
    assert "n0 resolves to 10.0.0.9" in found.text


def test_a_name_that_is_wrong_everywhere_is_the_fault_of_the_name() -> None:
    nodes = names(4)
    checks = [
        name_check(a, b, "unresolved" if b == "n2" else None)
        for a in nodes
        for b in nodes
        if a != b
    ]
    (found,) = verdicts(fleet(4, 1, usual, names=checks))
    assert (found.kind, found.nodes) == ("name", ("n2",))
    assert "does not resolve on 3 nodes" in found.text


def test_a_firewall_is_no_wrong_name() -> None:
    checks = [name_check(a, "n1", "refused") for a in ("n0", "n2", "n3")]
    assert verdicts(fleet(4, 1, usual, names=checks)) == []


def test_of_each_bad_link_one_node_is_left_out_the_common_one_first() -> None:
    links = [Verdict("link", pair, "") for pair in (("a", "b"), ("b", "c"), ("d", "e"))]
    assert len(excluded(links)) == 2
    assert "b" in excluded(links)
    assert excluded([*links, Verdict("slow", ("d",), "")]) == ["b", "d"]


def test_figures_of_no_transfers_are_empty() -> None:
    assert (node_rates([]), usual_rate({}), scores([])) == ({}, None, {})
    assert verdicts(Measured(["a"])) == []


def test_the_report_is_json_and_lines() -> None:
    measured = fleet(4, 1, lambda a, b, dice: 5e7 if "n2" in (a, b) else usual(a, b, dice))
    measured.names = [name_check("n0", "n1")]
    found = verdicts(measured)
    data = json.loads(json.dumps(as_data(measured, found)))
    assert data["exclude"] == ["n2"]
    assert data["nodes"][2]["score"] < 0.1
    assert len(data["transfers"]) == 12
    lines = node_lines(measured)
    assert lines[3].split()[:3] == ["n2", "50", "Mbit/s"]
    assert lines[1].endswith("100 µs")
    assert verdict_lines(found)[-1] == "--exclude=n2"
    assert verdict_lines([]) == ["nothing is wrong"]


def test_rates_are_written_with_their_unit() -> None:
    texts = [rate_text(rate) for rate in (9.41e9, 48e6, 12e3, 0)]
    assert texts == ["9.41 Gbit/s", "48 Mbit/s", "12 kbit/s", "0 bit/s"]
