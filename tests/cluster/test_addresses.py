"""Names and addresses of this machine, as the kernel and its resolver have them."""

import socket

import pytest

from hpcrun.cluster.addresses import gloo_interface, is_only_loopback, outward_address, reachable


def test_localhost_is_only_loopback_and_a_name_that_does_not_resolve_is_not() -> None:
    assert is_only_loopback("localhost")
    assert is_only_loopback("127.0.1.1")
    assert not is_only_loopback("203.0.113.9")
    assert not is_only_loopback("no-such-host.invalid")


def test_the_way_to_this_very_host_is_no_way_outward() -> None:
    assert outward_address(["127.0.0.1", "localhost", "no-such-host.invalid"]) is None
    assert outward_address([]) is None


def test_a_name_that_others_reach_stays_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reachable("203.0.113.9", {"SLURM_STEP_NODELIST": "a,b"}) == "203.0.113.9"
    # Nothing better is known: the name says at least what was meant.
    assert reachable("localhost", {}) == "localhost"
    assert reachable("localhost", {"SLURM_JOB_NODELIST": "localhost"}) == "localhost"


def test_gloo_is_left_alone_on_one_host_where_told_otherwise_and_where_names_are_sound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    two = {"SLURM_STEP_NODELIST": "localhost,127.0.0.1"}
    assert gloo_interface({"SLURM_STEP_NODELIST": "localhost"}) == {}
    assert gloo_interface({**two, "GLOO_SOCKET_IFNAME": "ib0"}) == {}
    assert gloo_interface({**two, "HPCRUN_LOCAL_CLUSTER": "1"}) == {}
    monkeypatch.setattr(socket, "gethostname", lambda: "203.0.113.9")
    assert gloo_interface(two) == {}
