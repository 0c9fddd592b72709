"""The whole check with agents that are processes of this machine."""

from __future__ import annotations

import os
import socket
import time

import psutil
import pytest

from hpcrun.network import links
from hpcrun.network.agents import Nodes, Processes, here, not_launched, start
from hpcrun.network.findings import findings
from hpcrun.network.measurements import NetworkMeasurements
from hpcrun.network.netcheck import Check, Options, Progress

QUICK = Options(seconds=0.5, streams=2)


def silence(step: int, steps: int, text: str) -> None:
    """Show nothing."""


def names(count: int) -> list[str]:
    """The names of the agents."""
    return [f"127.0.0.{number + 1}" for number in range(count)]


def check(
    nodes: Nodes, options: Options = QUICK, progress: Progress = silence
) -> NetworkMeasurements:
    """Return the measurements of the nodes, and end them."""
    try:
        return Check(nodes, options, progress).run()
    finally:
        nodes.close()


def test_every_pair_of_three_is_measured_both_ways() -> None:
    measured = check(start(here, names(3), 120))
    assert measured.silent == {}
    ways = [(one.sender, one.receiver) for one in measured.transfers if not one.again_for]
    assert len(ways) == len(set(ways)) == 6
    assert all(one.rate for one in measured.transfers)
    assert all(one.lost is not None for one in measured.transfers)
    assert len(measured.names) == 6
    assert all(check.problem is None and check.seconds for check in measured.names)


def test_a_node_that_stops_answering_is_silent() -> None:
    stopped = []

    def stop_one(step: int, steps: int, text: str) -> None:
        if text == "bandwidth" and not stopped:
            # A child of an earlier test may be a zombie, which has no environment.
            children = [
                (child, child.as_dict(["environ"])) for child in psutil.Process().children()
            ]
            (agent,) = (
                child
                for child, read in children
                if (read["environ"] or {}).get("HPCRUN_CHECK_NAME") == "127.0.0.3"
            )
            agent.kill()
            stopped.append(agent)

    measured = check(start(here, names(4), 120), progress=stop_one)
    assert list(measured.silent) == ["127.0.0.3"]
    assert ("silent", ("127.0.0.3",)) in [(one.check, one.nodes) for one in findings(measured)]
    well = {(one.sender, one.receiver) for one in measured.transfers if one.rate}
    assert ("127.0.0.1", "127.0.0.2") in well


def test_agents_that_do_not_start_are_silent_immediately() -> None:
    def begin(_: object) -> Processes:
        return Processes([(["sh", "-c", "echo 'no such partition' >&2; exit 1"], os.environ)])

    begun = time.monotonic()
    nodes = start(begin, names(2), 120)
    measured = check(nodes)
    assert set(measured.silent) == set(names(2))
    assert time.monotonic() - begun < 120
    assert "no such partition" in nodes.words()


def test_nodes_on_which_srun_starts_nothing_are_read() -> None:
    words = "srun: error: Task launch for StepId=7.0 failed on node n2: Communication connection failure"
    found = not_launched(words, ["n1", "n2", "n22"])
    assert found == {"n2": "Communication connection failure"}
    assert not_launched("srun: error: Unable to allocate resources", ["n1"]) == {}


def pair() -> tuple[socket.socket, socket.socket]:
    """Two ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        first = socket.create_connection(listener.getsockname())
        return first, listener.accept()[0]


def test_a_stalled_sender_has_the_rate_of_all_time() -> None:
    first, second = pair()
    with first, second:
        first.sendall(bytes(125_001))
        begun = time.monotonic()
        assert links.receive_for(second, 1.0) == pytest.approx(1e6, rel=0.01)
        assert time.monotonic() - begun < 30


def test_a_sender_that_closes_early_has_its_rate() -> None:
    first, second = pair()
    with second:
        with first:
            first.sendall(bytes(1_000_001))
        # Over the whole time it would be 8e4.
        assert links.receive_for(second, 100.0) > 4e5


def test_nothing_sent_is_no_rate() -> None:
    first, second = pair()
    with second:
        first.close()
        assert links.receive_for(second, 0.2) == 0.0


def test_a_header_that_is_none_is_refused() -> None:
    for text in (b"[]\n", b"no json\n", b"x" * 5000):
        first, second = pair()
        with first, second:
            first.sendall(text)
            with pytest.raises(ValueError, match=r".+"):
                links.read_line(second, 1)
