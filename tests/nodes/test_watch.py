"""The watch over nodes, with real agents on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import psutil
import pytest

from hpcrun.nodes import watch
from hpcrun.nodes.watch import (
    AgentProcess,
    Limits,
    NodeState,
    NodeWatch,
    is_cut_off,
    is_lost,
    kernel_answers,
)

NODES = ("node1", "node2", "node3")
PATIENCE = 300.0
QUICK = Limits(silence=2.5, unreached=1.0, decision=PATIENCE)


class Several:
    """Agents of several nodes, a process each."""

    def __init__(self, nodes: Sequence[str], told: Mapping[str, Any]) -> None:
        self._steps = [
            AgentProcess(
                [sys.executable, "-m", "hpcrun.nodes.agent"],
                {**os.environ, "SLURMD_NODENAME": node},
                told,
            )
            for node in nodes
        ]

    def ended(self) -> str | None:
        words = [step.ended() for step in self._steps]
        return None if None in words else " ".join(map(str, words))

    def close(self) -> None:
        for step in self._steps:
            step.close()


class Machine:
    """The nodes of a job on this machine."""

    def __init__(self) -> None:
        self.lost: dict[str, str] = {}
        self.messages: list[tuple[str, Mapping[str, Any]]] = []
        self.watch = NodeWatch(
            NODES,
            "node1",
            self._begin,
            lose=self.lost.__setitem__,
            heard=lambda node, message: self.messages.append((node, message)),
            answers=lambda: True,
            limits=QUICK,
            port_key=str(os.getpid()),
        )

    def _begin(self, nodes: Sequence[str], told: Mapping[str, Any]) -> Several:
        self.port, self.key = int(told["port"]), str(told["key"])
        return Several(nodes, told)

    def connect_all(self) -> None:
        self.watch.start(["127.0.0.1"])
        assert self.watch.wait(lambda: len(self.watch.connected()) == len(NODES), PATIENCE)

    def agent(self, node: str) -> psutil.Process:
        """Return the newest agent of a node."""
        found = []
        for process in psutil.Process().children(recursive=True):
            # Other tests may leave processes that nobody has waited for.
            with contextlib.suppress(psutil.Error):
                named = process.environ().get("SLURMD_NODENAME") == node
                if named and "hpcrun.nodes.agent" in process.cmdline():
                    found.append(process)
        return max(found, key=lambda process: process.create_time())

    def answer(self, key: str) -> Mapping[str, Any]:
        """Wait for the first message with ``key``."""
        found: list[Mapping[str, Any]] = []

        def arrived() -> bool:
            found[:] = [message for _, message in self.messages if key in message]
            return bool(found)

        assert self.watch.wait(arrived, PATIENCE), self.messages
        return found[0]


@contextlib.contextmanager
def rank(node: str, step: int) -> Iterator[subprocess.Popen[bytes]]:
    """A process of a step on a node."""
    named = {"SLURMD_NODENAME": node, "SLURM_STEP_ID": str(step)}
    process = subprocess.Popen(["sleep", "1000"], env=os.environ | named)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def machine() -> Iterator[Machine]:
    made = Machine()
    try:
        yield made
    finally:
        made.watch.close()


def test_a_node_without_its_agent_is_not_lost(machine, capfd):
    machine.connect_all()
    machine.agent("node2").kill()
    assert machine.watch.wait(lambda: "node2" not in machine.watch.connected(), PATIENCE)
    assert machine.watch.decided(NODES) == machine.lost == {}
    why = "so only Slurm notices a loss: the agent there has ended"
    assert f"hpcrun: no heartbeat of node2, {why}\n" in capfd.readouterr().out


def test_a_node_that_goes_down_after_its_agent_is_lost(machine, monkeypatch):
    """As in a shutdown, which ends the processes before the network."""
    machine.connect_all()
    machine.agent("node2").kill()
    down = time.monotonic() + 0.8 * QUICK.silence

    def answer(_address: str, _port: int, seconds: float) -> bool:
        up = time.monotonic() < down
        time.sleep(0.0 if up else seconds)
        return up

    monkeypatch.setattr(watch, "kernel_answers", answer)
    assert machine.watch.wait(lambda: "node2" in machine.watch.lost, PATIENCE)


def test_a_stopped_agent_is_no_lost_node(machine):
    machine.connect_all()
    agent = machine.agent("node2")
    agent.send_signal(signal.SIGSTOP)
    try:
        # The agent's kernel accepts connections, so the silence of three limits proves nothing.
        decided = machine.watch.wait(lambda: bool(machine.lost), 3 * QUICK.silence)
        assert (decided, machine.lost) == (False, {})
    finally:
        agent.send_signal(signal.SIGCONT)
    assert machine.watch.decided(NODES) == {}


def test_agents_end_with_the_watch(machine):
    machine.connect_all()
    agents = [machine.agent(node) for node in NODES]
    machine.watch.send("node2", "start", name="sleeper", argv=["sleep", "600"])
    machine.watch.send("node2", "stop", name="nothing")
    machine.answer("stopped")
    sleepers = machine.agent("node2").children()
    machine.watch.close()
    gone, alive = psutil.wait_procs([*agents, *sleepers], PATIENCE)
    assert (len(gone), alive) == (4, [])


def test_an_agent_returns_the_output_of_a_program(machine):
    machine.connect_all()
    machine.watch.send(
        "node3", "start", name="echo", argv=["sh", "-c", "echo $WORD; exit 3"], env={"WORD": "x"}
    )
    assert machine.answer("ended") == {"ended": "echo", "code": 3, "output": "x\n"}


def test_an_agent_survives_a_program_that_does_not_exist(machine):
    machine.connect_all()
    machine.watch.send("node3", "start", name="none", argv=["/no/such/program"])
    assert machine.answer("ended")["code"] == 127
    assert "node3" in machine.watch.connected()


def test_an_agent_reports_peers_that_it_cannot_reach(machine):
    machine.connect_all()
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nowhere = closed.getsockname()
    for peer, reached in ((machine.watch.door("node2"), True), (nowhere, False)):
        machine.messages.clear()
        machine.watch.send("node1", "reach", peers=[peer])
        assert machine.answer("reached")["reached"] is reached


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        # So does an agent that a killed batch step has left.
        (b'{"key": "wrong", "node": "node2", "door": 1}\n', '{"do": "end"}\n'),
        ('{"key": "é", "node": "node2"}\n'.encode(), '{"do": "end"}\n'),
        (b'{"key": "\\ud800"}\n', '{"do": "end"}\n'),
        (b'{"a":' * 800 + b'\n{"key": 1}\n', '{"do": "end"}\n'),
        (b"x" * 5000, ""),
        (b"[" * 5000 + b"\n", ""),
    ],
)
def test_a_stranger_without_the_key_is_no_agent(machine, line, answer):
    machine.connect_all()
    with socket.create_connection(("127.0.0.1", machine.port)) as link:
        link.sendall(line)
        # What is left unread makes the kernel end the connection with an error.
        with contextlib.suppress(ConnectionResetError):
            assert link.makefile().read() == answer
    assert machine.watch.connected() == list(NODES)


def greeting(machine: Machine, node: str) -> socket.socket:
    """Connect as the agent of a node does."""
    link = socket.create_connection(("127.0.0.1", machine.port))
    hello = {"key": machine.key, "node": node, "door": 1}
    link.sendall(json.dumps(hello).encode() + b"\n")
    return link


def test_a_second_greeting_replaces_the_first_connection(machine):
    machine.connect_all()
    with greeting(machine, "node2") as first, greeting(machine, "node2") as second:
        assert first.makefile().read() == ""
        second.sendall(b'{"word": "second"}\n')
        machine.answer("word")
        # The end of the replaced connection is not the end of the new one.
        assert "node2" in machine.watch.connected()
    assert machine.lost == {}


def test_an_agent_kills_only_ranks_of_one_step(machine):
    machine.connect_all()
    with contextlib.ExitStack() as stack:
        ranks = [
            stack.enter_context(rank(node, step))
            for node, step in (("node2", 3), ("node2", 4), ("node3", 3))
        ]
        machine.watch.send("node2", "kill", steps=[3], seconds=PATIENCE)
        assert machine.answer("killed") == {"killed": [3], "left": 0}
        assert ranks[0].wait(PATIENCE) == -signal.SIGKILL
        assert [one.poll() for one in ranks[1:]] == [None, None]


def test_a_kernel_that_accepts_or_refuses_answers():
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server:
        port = server.getsockname()[1]
        assert kernel_answers("127.0.0.1", port, 1.0) is True
        waiting = [socket.socket() for _ in range(4)]
        for one in waiting:
            one.setblocking(False)
            one.connect_ex(("127.0.0.1", port))
        # The queue is full: the kernel drops further requests, as a dead node does.
        assert kernel_answers("127.0.0.1", port, 0.5) is False
        for one in waiting:
            one.close()
    assert kernel_answers("127.0.0.1", port, 1.0) is True


@pytest.mark.parametrize(
    ("heard", "unreached", "lost"),
    [
        (0.0, 1.0, True),
        (0.0, None, False),
        (0.0, 8.0, False),
        (6.0, 1.0, False),
        (None, 1.0, False),
    ],
)
def test_a_lost_node_is_silent_and_unreachable(heard, unreached, lost):
    assert is_lost(NodeState(heard=heard, unreached=unreached), 10.0, Limits()) is lost


def test_a_host_that_is_cut_off_blames_no_node():
    def states(*unreached: float | None) -> dict[str, NodeState]:
        return {f"node{i}": NodeState(heard=1.0, unreached=at) for i, at in enumerate(unreached, 1)}

    assert is_cut_off(states(None, 2.0, 2.0), "node1", lambda: True)
    assert not is_cut_off(states(None, 2.0, None), "node1", lambda: False)
    # Of two nodes, only the controller can tell.
    assert is_cut_off(states(None, 2.0), "node1", lambda: False)
    assert not is_cut_off(states(None, 2.0), "node1", lambda: True)
