"""The interface on which every pair of nodes connects; the nodes are addresses of this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from hpcrun.ranks.addresses import AnswerServer, Listener, reached

Open = Callable[[dict[str, list[str]]], Listener]


@pytest.fixture
def opened() -> Iterator[Open]:
    """Let a node answer until the end of the test."""
    keepers = []

    def open_door(interfaces: dict[str, list[str]]) -> Listener:
        keepers.append(AnswerServer(interfaces))
        return keepers[-1].door

    yield open_door
    for keeper in keepers:
        keeper.close()


def test_interfaces_on_which_all_peers_answer_are_reached(opened: Open) -> None:
    peers = [
        opened({"eth0": ["127.0.0.2"], "eth1": ["127.0.1.2"]}),
        opened({"eth1": ["127.0.1.3"], "eth0": ["127.0.0.3"]}),
    ]
    own = {"eth0": ["127.0.0.1"], "eth1": ["127.0.1.1"], "eth2": ["127.0.2.1"]}
    assert reached(own, peers) == ["eth0", "eth1"]
    assert reached(own, [*peers, opened({"eth1": ["127.0.1.4"]})]) == ["eth1"]
    assert reached({"eth0": ["::1"]}, peers) == []
    assert reached(own, []) == ["eth0", "eth1", "eth2"]


def test_a_bridge_with_an_equal_address_leads_home(
    opened: Open,
) -> None:
    mine = {"docker0": ["127.0.0.9"], "eth0": ["127.0.0.1"]}
    me = opened(mine)
    # Another host would have the same port only by chance; the node's own listener answers here.
    peer = Listener(me.port, "another word", {"docker0": ["127.0.0.9"]})
    assert reached(mine, [peer]) == []


def test_a_node_that_has_closed_its_door_is_not_reached(opened: Open) -> None:
    keeper = AnswerServer({"eth0": ["127.0.0.2"]})
    assert reached({"eth0": ["127.0.0.1"]}, [keeper.door]) == ["eth0"]
    keeper.close()
    assert reached({"eth0": ["127.0.0.1"]}, [keeper.door]) == []
