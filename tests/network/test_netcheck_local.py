"""The whole check with agents that are processes of this machine."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from pathlib import Path

import psutil
import pytest

from hpcrun.errors import NetworkError
from hpcrun.network import links
from hpcrun.network.agents import Nodes, Processes, here, not_launched, srun_command, start
from hpcrun.network.findings import findings
from hpcrun.network.links import Links, tried_ports
from hpcrun.network.measurements import NetworkMeasurements, Transfer
from hpcrun.network.netcheck import Check, Options, Progress, targets_of
from hpcrun.network.rate_report import matrix, table, write_png
from hpcrun.ranks.addresses import FIRST_PORT, ephemeral_range

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


def free_ports(count: int) -> list[int]:
    """Return ports on which no process listens."""
    servers = [socket.create_server(("", 0)) for _ in range(count)]
    found = [server.getsockname()[1] for server in servers]
    for server in servers:
        server.close()
    return sorted(found)


def test_the_ports_of_a_run_are_free_after_the_trial() -> None:
    wanted = tuple(free_ports(4))
    nodes = start(here, names(3), 120)
    try:
        measured = Check(nodes, Options(seconds=0.2, streams=1, ports=wanted), silence).run()
        assert measured.silent == {}
        # One machine can hold each port only once, so most are tried on one of the agents.
        assert {port for check in measured.ports for port in check.tried} == set(wanted)
        assert len(measured.ports) == 6
        assert all(check.failed == () for check in measured.ports)
        for port in wanted:
            socket.create_server(("", port)).close()
    finally:
        nodes.close()


def test_ports_that_refuse_differ_from_ports_with_another_program() -> None:
    first, second = Links("127.0.0.1"), Links("127.0.0.2")
    free, unused = free_ports(2)
    peer = {"name": "127.0.0.1", "address": "127.0.0.1", "port": 0, "addresses": []}
    with socket.create_server(("", 0)) as stranger:
        threading.Thread(target=talk, args=(stranger,), daemon=True).start()
        other = stranger.getsockname()[1]
        for node in (first, second):
            node.meet([peer], "t")
        first.hold([free])
        held = {"127.0.0.1": [free, unused, other]}
        (seen,) = second.reach(held, {"127.0.0.2": ["127.0.0.1"]})
    first.hold([])
    assert (seen["refused"], seen["unreachable"]) == ([unused], [other])


def talk(server: socket.socket) -> None:
    """Greet each connection like a program that is not an agent."""
    with contextlib.suppress(OSError):
        while True:
            server.accept()[0].sendall(b"220 mail\n")


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_every_node_tries_the_first_node_and_is_tried(count: int) -> None:
    nodes = names(count)
    tried = {own: targets_of(own, nodes) for own in nodes}
    assert all(own not in found for own, found in tried.items())
    assert all(nodes[0] in found for own, found in tried.items() if own != nodes[0])
    assert count == 1 or {one for found in tried.values() for one in found} == set(nodes)
    assert all(len(found) <= 3 for found in tried.values())


def test_both_ends_of_the_ranges_are_tried() -> None:
    low, high = ephemeral_range()
    found = tried_ports({"MASTER_PORT": "29500"}, "7")
    assert {FIRST_PORT, low - 1, low, high, 29500} <= set(found)
    assert found == sorted(set(found))
    assert 10 <= sum(port < low for port in found) <= 16
    assert 10 <= sum(low <= port <= high for port in found) <= 16


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


def test_the_step_has_a_task_on_every_node() -> None:
    command = srun_command(["a1", "a2"], ["agent"])
    assert command[0] == "srun"
    assert command[command.index("--nodes") + 1] == command[command.index("--ntasks") + 1] == "2"
    assert command[command.index("--nodelist") + 1] == "a1,a2"
    assert command[-1] == "agent"


def test_nodes_on_which_srun_starts_nothing_are_read() -> None:
    words = "srun: error: Task launch for StepId=7.0 failed on node n2: Communication connection failure"
    assert not_launched(words, ["n1", "n2", "n22"]) == ["n2"]
    assert not_launched("srun: error: Unable to allocate resources", ["n1"]) == []


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


def test_the_round_trip_is_measured() -> None:
    first, second = pair()
    with first, second:
        threading.Thread(target=links.echo, args=(second, 60), daemon=True).start()
        assert 0 < links.round_trip(first, 60) < 30


def test_the_picture_in_the_terminal_shows_what_failed() -> None:
    from rich.console import Console

    transfers = [Transfer("a", "b", 1e10), Transfer("b", "a", None)]
    assert matrix(["a", "b"], transfers) == [[None, 1e10], [0.0, None]]
    console = Console(width=80)
    with console.capture() as captured:
        console.print(table(["a", "b"], transfers))
    assert "10" in captured.get()


def test_a_picture_without_matplotlib_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(NetworkError, match="pip install matplotlib"):
        write_png(tmp_path / "a.png", ["a"], [])


@pytest.mark.parametrize("count", [2, 8, 200])
def test_a_picture_is_written(tmp_path: Path, count: int) -> None:
    pytest.importorskip("matplotlib")
    nodes = [f"n{number}" for number in range(count)]
    transfers = [
        Transfer(one, other, None if "n1" in (one, other) else 1e10)
        for one in nodes[:8]
        for other in nodes[:8]
        if one != other
    ]
    write_png(tmp_path / "a.png", nodes, transfers, {"n1"})
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_of_an_unknown_kind_is_one_sentence(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(NetworkError, match=r"a\.xyz: cannot be written"):
        write_png(tmp_path / "a.xyz", ["a", "b"], [Transfer("a", "b", 1e10)])


def test_json_of_a_check_has_no_nan() -> None:
    json.dumps([Transfer("a", "b", 1.0).as_record()], allow_nan=False)
