"""Nodes try each other's addresses by TCP, and name those that do not accept a connection."""

from contextlib import ExitStack

import pytest

from hpcrun.ranks import interfaces
from hpcrun.ranks.addresses import listen
from hpcrun.ranks.distributed import DistributedConfig
from hpcrun.ranks.interfaces import NodeLinks, nccl_interface


def links_of(node: int, nodes: int = 3, local_rank: int = 0) -> NodeLinks:
    place = {
        "num_nodes": nodes,
        "node_rank": node,
        "num_gpus_per_node": 2,
        "local_rank": local_rank,
    }
    rank = 2 * node + local_rank
    return NodeLinks(DistributedConfig(world_size=2 * nodes, rank=rank, **place))


def test_a_node_that_does_not_listen_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interfaces, "own_interfaces", lambda: {"ib0": ["127.0.0.1"]})
    monkeypatch.setenv("SLURMD_NODENAME", "a1")
    notes: dict[str, str] = {}
    made = [links_of(node) for node in range(3)]
    with ExitStack() as opened:
        for links in made:
            opened.enter_context(links.open(notes.__setitem__))
        assert [links.broken(notes.get, 5.0) for links in made] == [{}, {}, {}]
        with listen([0]) as listener:
            port = listener.getsockname()[1]
        notes["link/2"] = f'["a3", "ib0", "127.0.0.1", {port}]'
        refused = {"a3": "127.0.0.1 (interface ib0: Connection refused)"}
        assert [links.broken(notes.get, 5.0) for links in made] == [refused, refused, {}]
    # A node that has left its connection is not tried.
    assert made[0].broken(notes.get, 5.0) is None


def test_further_ranks_and_single_nodes_try_nothing() -> None:
    notes: dict[str, str] = {}
    for links in (links_of(1, local_rank=1), links_of(0, nodes=1)):
        with links.open(notes.__setitem__):
            assert notes == {}
            assert links.broken({"link/0": "x", "link/1": "x"}.get, 1.0) is None


@pytest.mark.parametrize(
    ("given", "names", "chosen"),
    [
        (None, "lo docker0 eth0 ib1 ib0", "ib1"),
        (None, "docker0 eth0 eth1", "eth0"),
        (None, "docker0", "docker0"),
        ("eth1,eth0", "ib0 eth0 eth1", "eth0"),
        ("=eth", "eth0", None),
        ("^ib", "ib0 eth0", "eth0"),
        (None, "", None),
    ],
)
def test_the_interface_is_that_of_nccl(given: str | None, names: str, chosen: str | None) -> None:
    environ = {} if given is None else {"NCCL_SOCKET_IFNAME": given}
    assert nccl_interface(environ, {name: ["10.0.0.1"] for name in names.split()}) == chosen
