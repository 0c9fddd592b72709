"""Names and addresses of this machine, from the kernel and its resolver."""

from __future__ import annotations

import pytest

from hpcrun.ranks import addresses
from hpcrun.ranks.addresses import (
    bound_address,
    is_loopback,
    is_only_loopback,
    is_own,
    is_sound,
    outward_address,
)


@pytest.mark.parametrize(
    ("address", "expected"),
    [("127.0.0.1", True), ("::1", True), ("::ffff:127.0.1.1", True), ("::ffff:10.0.0.1", False)],
)
def test_loopback_is_seen_through_an_ipv6_socket(address: str, expected: bool) -> None:
    assert is_loopback(address) is expected


def test_localhost_is_loopback_and_an_unknown_name_is_not() -> None:
    assert is_only_loopback("localhost")
    assert is_only_loopback("127.0.1.1")
    assert not is_only_loopback("203.0.113.9")
    assert not is_only_loopback("no-such-host.invalid")
    assert not is_only_loopback("a" * 70 + ".invalid")


def test_the_way_to_this_very_host_is_no_way_outward() -> None:
    assert outward_address(["127.0.0.1", "localhost", "no-such-host.invalid"]) is None
    assert outward_address([]) is None


def test_an_address_of_another_host_is_not_own() -> None:
    assert is_own("127.0.0.1")
    assert not is_own("203.0.113.9")


@pytest.mark.parametrize(
    ("found", "bound", "sound"),
    [
        (["203.0.113.9"], None, False),
        (["203.0.113.9", "127.0.0.1"], "127.0.0.1", False),
        ([], None, False),
    ],
)
def test_a_name_is_sound_if_bound_and_reached(
    found: list[str], bound: str | None, sound: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(addresses, "addresses_of", lambda _: found)
    assert (bound_address("me"), is_sound("me")) == (bound, sound)
