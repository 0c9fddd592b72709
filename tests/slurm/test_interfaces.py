"""Interfaces are found by name, and rank 0 publishes addresses at which it can be reached."""

from __future__ import annotations

import socket
from collections.abc import Callable
from types import SimpleNamespace

import psutil
import pytest

from hpcrun.errors import NodeUnfit
from hpcrun.ranks import interfaces
from hpcrun.ranks.interfaces import (
    chosen_interfaces,
    gloo_interface,
    interface_variables,
    own_interfaces,
    rendezvous_addresses,
)

NODE = {"eth0": ["10.74.0.1"], "ib0": ["10.1.0.1", "fd00::1"], "ib1": ["10.1.1.1"]}
TWO = {"SLURM_STEP_NODELIST": "node1,node2", "SLURMD_NODENAME": "node1"}


@pytest.mark.parametrize(
    ("wanted", "names"),
    [
        ("ib0", ["ib0"]),
        ("ib", ["ib0", "ib1"]),
        ("ib1,eth", ["ib1", "eth0"]),
        ("=ib", []),
        ("=ib1,eth0", ["ib1", "eth0"]),
        ("^ib", ["eth0"]),
        ("^=ib0,eth0", ["ib1"]),
        ("hsn", []),
        ("ib,ib0", ["ib0", "ib1"]),
    ],
)
def test_interfaces_are_named_as_nccl_names_them(wanted: str, names: list[str]) -> None:
    assert chosen_interfaces(wanted, NODE) == names


def test_gloo_gets_a_whole_name_and_nccl_what_was_given() -> None:
    assert interface_variables("ib", {}, NODE) == {
        "GLOO_SOCKET_IFNAME": "ib0",
        "NCCL_SOCKET_IFNAME": "ib",
    }
    own = {"GLOO_SOCKET_IFNAME": "eth0"}
    assert interface_variables("ib", own, NODE) == {"NCCL_SOCKET_IFNAME": "ib"}


def test_a_node_without_the_interface_is_named() -> None:
    with pytest.raises(
        NodeUnfit, match=r"^\S+: job\.interface=hsn .*eth0 \(10\.74\.0\.1\), ib0"
    ) as why:
        interface_variables("hsn", {}, NODE)
    assert "\n" not in str(why.value)


Resolve = Callable[[dict[str, str | None]], None]


@pytest.fixture
def resolve(monkeypatch: pytest.MonkeyPatch) -> Resolve:
    """Bind names to addresses of this host; the host is called ``node1``."""

    def set_names(bound: dict[str, str | None], outward: str | None = "10.74.0.1") -> None:
        def sound(name: str) -> bool:
            return (bound.get(name) or "127.").partition(".")[0] != "127"

        monkeypatch.setattr(interfaces, "bound_address", bound.get)
        monkeypatch.setattr(interfaces, "is_sound", sound)
        monkeypatch.setattr(interfaces, "outward_address", lambda _: outward)
        monkeypatch.setattr(interfaces.socket, "gethostname", lambda: "node1")

    return set_names


def test_rank_0_offers_its_name_before_its_addresses(resolve: Resolve) -> None:
    resolve({"node1": "10.74.0.1"})
    assert rendezvous_addresses(TWO, None, NODE) == [
        "node1", "10.74.0.1", "10.1.0.1", "fd00::1", "10.1.1.1",
    ]  # fmt: skip


def test_what_the_user_names_comes_before_all_else(resolve: Resolve) -> None:
    resolve({"node1": "10.74.0.1"})
    environ = {**TWO, "MASTER_ADDR": "node1i"}
    found = rendezvous_addresses(environ, "ib1", NODE)
    assert found[:3] == ["node1i", "10.1.1.1", "node1"]


def test_a_loopback_name_is_tried_last(resolve: Resolve) -> None:
    resolve({"node1": "127.0.1.1"})
    assert rendezvous_addresses(TWO, None, NODE)[0] == "10.74.0.1"
    assert rendezvous_addresses(TWO, None, NODE)[-1] == "node1"


def test_a_loopback_master_address_is_for_one_node_only(resolve: Resolve) -> None:
    resolve({"node1": "10.74.0.1"})
    given = {"MASTER_ADDR": "127.0.0.1"}
    assert "127.0.0.1" not in rendezvous_addresses({**TWO, **given}, None, NODE)
    alone = {"SLURM_STEP_NODELIST": "node1", **given}
    assert rendezvous_addresses(alone, None, NODE)[0] == "127.0.0.1"
    assert rendezvous_addresses({**TWO, **given, "HPCRUN_LOCAL_CLUSTER": "1"}) == ["127.0.0.1"]


@pytest.mark.parametrize(
    ("bound", "outward", "chosen"),
    [
        ("10.74.0.1", "10.74.0.1", None),
        ("10.1.0.1", "10.74.0.1", "eth0"),
        ("127.0.1.1", "10.74.0.1", "eth0"),
        (None, "10.1.1.1", "ib1"),
        # The route to the other hosts is unknown.
        (None, None, "eth0"),
        ("10.1.0.1", None, None),
    ],
)
def test_gloo_is_sent_to_the_network_of_the_other_nodes(
    bound: str | None, outward: str | None, chosen: str | None, resolve: Resolve
) -> None:
    resolve({"node1": bound}, outward)  # type: ignore[call-arg]
    expected = {} if chosen is None else {"GLOO_SOCKET_IFNAME": chosen}
    assert gloo_interface(TWO, ["node2"], NODE) == expected


def test_gloo_chooses_on_one_node_or_by_the_user(resolve: Resolve) -> None:
    resolve({})
    assert gloo_interface({"SLURM_STEP_NODELIST": "node1"}, [], NODE) == {}
    assert gloo_interface({**TWO, "GLOO_SOCKET_IFNAME": "ib0"}, [], NODE) == {}
    assert gloo_interface({**TWO, "HPCRUN_LOCAL_CLUSTER": "1"}, [], NODE) == {}


Addresses = dict[str, list[str]]


@pytest.mark.parametrize(
    ("has", "found"),
    [
        (
            {"idrac": ["169.254.0.2"], "eth0": ["10.0.0.1", "169.254.7.7"]},
            {"eth0": ["10.0.0.1"]},
        ),
        ({"eth0": ["169.254.7.7", "fd00::1"]}, {"eth0": ["fd00::1"]}),
        ({"eth0": ["169.254.7.7"], "lo": ["127.0.0.1"]}, {}),
    ],
)
def test_link_local_addresses_do_not_count(
    monkeypatch: pytest.MonkeyPatch, has: Addresses, found: Addresses
) -> None:
    listed = {
        name: [
            SimpleNamespace(
                family=socket.AF_INET6 if ":" in address else socket.AF_INET, address=address
            )
            for address in addresses
        ]
        for name, addresses in has.items()
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: listed)
    up = {name: SimpleNamespace(isup=True) for name in has}
    monkeypatch.setattr(psutil, "net_if_stats", lambda: up)
    assert own_interfaces() == found
