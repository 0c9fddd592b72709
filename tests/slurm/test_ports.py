"""Rendezvous ports: below the ephemeral range, the same everywhere, probed by listening."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcrun.errors import ClusterError
from hpcrun.ranks.addresses import (
    ephemeral_range,
    is_free,
    listen,
    port_candidates,
    wanted_ports,
)

jobs = st.integers(1, 2**26).map(str) | st.builds("{}_{}".format, st.integers(1), st.integers(0))


@given(jobs)
def test_candidates_are_different_and_below_the_ephemeral_range(job_id: str) -> None:
    ports = port_candidates(job_id, ephemeral=(32768, 60999))
    assert len(set(ports)) == 32
    assert all(10000 <= port < 32768 for port in ports)


def test_candidates_do_not_depend_on_the_process() -> None:
    # The values are a contract between ranks that may run different Python builds.
    assert port_candidates("123", 3, (32768, 60999)) == [28831, 30174, 31517]


def test_neighbouring_jobs_and_array_tasks_start_elsewhere() -> None:
    firsts = {port_candidates(f"7_{task}", ephemeral=(32768, 60999))[0] for task in range(50)}
    firsts |= {port_candidates(str(job), ephemeral=(32768, 60999))[0] for job in range(50)}
    assert len(firsts) > 95


@pytest.mark.parametrize("low", [1024, 10010])
def test_a_stretched_ephemeral_range_leaves_enough_ports(low: int) -> None:
    ports = port_candidates("123", ephemeral=(low, 65535))
    assert len(set(ports)) == 32
    assert all(10000 <= port <= 65535 for port in ports)


def test_the_ephemeral_range_is_the_kernels(tmp_path: Path) -> None:
    written = tmp_path / "range"
    written.write_text("20000\t30000\n")
    assert ephemeral_range(written) == (20000, 30000)
    assert ephemeral_range(tmp_path / "absent") == (32768, 60999)


@pytest.mark.parametrize("listener", ["127.0.0.1", "0.0.0.0"])
def test_a_port_is_free_until_someone_listens_and_again_after(
    listener: str, free_port: int
) -> None:
    # create_server reuses the address: a connection of an earlier test may still wait in TIME_WAIT.
    with socket.create_server((listener, free_port)):
        assert not is_free("", free_port)
        assert not is_free("127.0.0.1", free_port)
    assert is_free("", free_port)
    assert is_free("127.0.0.1", free_port)


def test_a_listener_on_ipv6_is_noticed() -> None:
    try:
        server = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.skip("no IPv6 loopback here")
    with server:
        assert not is_free("", server.getsockname()[1])


def test_the_port_of_the_environment_is_tried_first() -> None:
    assert wanted_ports({"MASTER_PORT": "12345"}, "7") == [12345, *port_candidates("7")]
    assert wanted_ports({}, "7") == port_candidates("7")


def test_a_taken_port_is_skipped_on_all_addresses() -> None:
    with socket.socket() as taken, socket.socket() as probe:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        probe.bind(("", 0))
        ports = [taken.getsockname()[1], probe.getsockname()[1]]
        probe.close()
        with listen(ports) as listener:
            assert listener.getsockname()[1] == ports[1]
            for address in ("127.0.0.1", "127.0.0.9"):
                socket.create_connection((address, ports[1]), timeout=10).close()
        with pytest.raises(ClusterError, match=f"{ports[0]}.*can be bound"):
            listen(ports[:1])
