"""The watch over a job's nodes: the batch step learns of a lost node from the beats of its agent.

Slurm reports a lost node after `SlurmdTimeout`, by default 300 s, and the ranks on the other nodes wait in a
collective until then. A node counts as lost after no beat for 5 s, if the kernel of the node neither accepts
nor refuses a connection for 3 s, while other nodes answer. A node still answers after
its agent was stopped or killed; Slurm notices the loss of such a node.
"""

import contextlib
import errno
import secrets
import selectors
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, Protocol

from hpcrun.nodes.agent import END
from hpcrun.nodes.lines import Connection, encode
from hpcrun.ranks.addresses import listen, port_candidates

_TICK = 0.25
# A node that refuses the connection is reached, as one that accepts it.
_UNREACHED = (errno.EHOSTUNREACH, errno.ETIMEDOUT, errno.EHOSTDOWN)
# Seconds for the start of the agents, with a Python from a busy file server.
_START = 120.0
# Bytes of an agent's first line, which anybody on the network may send.
_GREETING = 1 << 12
_ENDED = "the agent there has ended"


@dataclass(frozen=True)
class Limits:
    """Seconds. ``silence``: without a beat. ``unreached``: without an answer of the node's kernel.

    ``decision``: at most for the decision about a node when the ranks have ended.
    """

    silence: float = 5.0
    unreached: float = 3.0
    decision: float = 12.0


class AgentStep(Protocol):
    """The agents of all nodes, which were started together."""

    def ended(self) -> str | None:
        """Return the messages about the start if no agent runs any more, otherwise None."""

    def close(self) -> None:
        """End the agents."""


Begin = Callable[[Sequence[str], Mapping[str, Any]], AgentStep]
"""Starts an agent on each node, with the first line for its standard input."""


class AgentProcess:
    """Agents that are one process here: that of srun, or one agent on this machine."""

    def __init__(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        told: Mapping[str, Any],
    ) -> None:
        # Not the batch log: messages about this step would be taken for messages about the ranks.
        self._words: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=self._words,
            stderr=self._words,
            env=dict(environ),
            start_new_session=True,
        )
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(encode(told))
            self._process.stdin.flush()

    def ended(self) -> str | None:
        """Return the messages about the start if the process has ended, otherwise None."""
        if self._process.poll() is None:
            return None
        self._words.seek(0)
        return self._words.read(1 << 16).decode(errors="replace")

    def close(self) -> None:
        """Ask the agents to end, by a line for their standard input; kill what does not end."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(END)
            self._process.stdin.close()
        try:
            self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._words.close()


@dataclass
class NodeState:
    """The known facts of a node; times are those of time.monotonic.

    ``heard``: the last message; None: the node is not watched, because no agent has connected yet, or it has
    ended. ``unreached``: since then the node's kernel does not answer. ``door``: the port on which the agent
    answers other nodes. ``answered``: start of the newest probe that the kernel did not leave unanswered.
    """

    heard: float | None = None
    connection: Connection | None = None
    address: str = ""
    door: int = 0
    unreached: float | None = None
    answered: float = 0.0
    probed: bool = False


def is_silent(state: NodeState, now: float, limits: Limits) -> bool:
    """Return True if a connected node has sent nothing for longer than ``limits`` allow."""
    return state.heard is not None and now - state.heard > limits.silence


def is_lost(state: NodeState, now: float, limits: Limits) -> bool:
    """Return True if a node is silent and its kernel has not answered for long enough."""
    dead = state.unreached is not None and now - state.unreached >= limits.unreached
    return dead and is_silent(state, now, limits)


def is_cut_off(states: Mapping[str, NodeState], own: str, answers: Callable[[], bool]) -> bool:
    """Return True if this host has no network, or may have none: all other nodes are silent.

    Args:
        answers: returns True if the controller answers: of two nodes, only a third host can tell.
    """
    others = [state for name, state in states.items() if name != own and state.heard is not None]
    silent = all(state.unreached is not None for state in others)
    return silent and (len(others) > 1 or not answers())


def kernel_answers(address: str, port: int, seconds: float) -> bool | None:
    """Return True if the host of ``address`` accepts or refuses a connection, False if it does not answer.

    None: unknown, for example because this host has no network.
    """
    try:
        socket.create_connection((address, port), seconds).close()
    except TimeoutError:
        return False
    except ConnectionError:
        return True
    except OSError as error:
        return False if error.errno in _UNREACHED else None
    return True


class NodeWatch:
    """The server for the agents of a job, in a thread of the batch step.

    Args:
        nodes: all nodes of the job.
        own: the node of this process.
        begin: starts the agents.
        lose: called in the watch's thread with each lost node and the reason.
        heard: called there with each message of a node that is not a beat.
        answers: returns True if Slurm's controller answers.
        orders: further values of the first line for an agent; see ``agent.py``.

    Attributes:
        lost: the lost nodes, each with the reason; they stay lost.
    """

    def __init__(
        self,
        nodes: Sequence[str],
        own: str,
        begin: Begin,
        *,
        lose: Callable[[str, str], None],
        heard: Callable[[str, Mapping[str, Any]], None],
        answers: Callable[[], bool],
        limits: Limits | None = None,
        port_key: str,
        orders: Mapping[str, Any] | None = None,
    ) -> None:
        self.nodes, self.lost = list(nodes), dict[str, str]()
        self._own, self._begin, self._lose, self._heard = own, begin, lose, heard
        self._answers = answers
        self._limits = limits or Limits()
        self._states = {node: NodeState() for node in nodes}
        self._ports = port_candidates(port_key)
        self._server: socket.socket | None = None
        self._key = secrets.token_hex(16)
        self._told: dict[str, Any] = dict(orders or {})
        self._step: AgentStep | None = None
        self._unwatched: set[str] = set()
        self._changed = threading.Condition()
        self._closing = False
        self._selector = selectors.DefaultSelector()
        self._strangers: dict[Connection, float] = {}
        self._agents: dict[Connection, str] = {}
        self._patience_ends: float | None = None
        self._thread = threading.Thread(target=self._run, name="hpcrun-node-watch", daemon=True)

    def start(self, addresses: Sequence[str]) -> None:
        """Start the agents and watch them; the agents connect later.

        Args:
            addresses: where the other nodes may reach this process, in the order to try.

        Raises:
            ClusterError: no port is free.
            RuntimeError: no thread can be started.
        """
        self._server = listen(self._ports)
        self._server.setblocking(False)
        port = self._server.getsockname()[1]
        self._told |= {"addresses": list(addresses), "port": port, "key": self._key}
        self._selector.register(self._server, selectors.EVENT_READ, self._server)
        try:
            self._step = self._begin(self.nodes, self._told)
        except OSError as error:
            self._say_unwatched(self.nodes, str(error))
        self._patience_ends = time.monotonic() + _START
        self._thread.start()

    def close(self) -> None:
        """End the watch and all agents."""
        self._closing = True
        if self._thread.is_alive():
            self._thread.join(5.0)
        if self._step is not None:
            self._step.close()
            self._step = None
        for state in self._states.values():
            if state.connection is not None:
                state.connection.link.close()
        if self._server is not None:
            self._server.close()
        self._selector.close()

    def connected(self) -> list[str]:
        """Return the nodes with a connected agent."""
        return [node for node, state in self._states.items() if state.connection is not None]

    def door(self, node: str) -> tuple[str, int] | None:
        """Return where the agent of a node answers other nodes; None before it has connected."""
        state = self._states[node]
        return (state.address, state.door) if state.door else None

    def wait(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Wait until ``condition`` holds, which is checked after each message; return whether it holds."""
        with self._changed:
            return self._changed.wait_for(condition, seconds)

    def send(self, node: str, order: str, **arguments: Any) -> bool:
        """Send an order to the agent of a node; return False if the agent is not connected."""
        connection = self._states[node].connection
        if connection is None:
            return False
        try:
            connection.send({"do": order, "with": arguments})
        except OSError:
            return False
        return True

    def decided(self, nodes: Collection[str]) -> Mapping[str, str]:
        """Return the lost nodes of ``nodes``, once each of the others has answered.

        The ranks may notice a lost node earlier than this watch: their connections end.
        """
        asked = time.monotonic()
        watched = [node for node in nodes if node in self._states]
        for node in watched:
            self.send(node, "ping")

        def is_decided(node: str) -> bool:
            state = self._states[node]
            answered = state.connection is not None and (state.heard or 0.0) > asked
            return answered or node in self.lost or state.heard is None

        if self._thread.is_alive():
            self.wait(lambda: self._closing or all(map(is_decided, watched)), self._limits.decision)
        return {node: self.lost[node] for node in watched if node in self.lost}

    def _say_unwatched(self, nodes: Sequence[str], why: str) -> None:
        new = [node for node in nodes if node not in self._unwatched]
        self._unwatched.update(new)
        if new:
            named = ", ".join(new[:4]) + (" …" if len(new) > 4 else "")
            line = f"no heartbeat of {named}, so only Slurm notices a loss: {why}"
            print(f"hpcrun: {line}", flush=True)

    def _is_unknown(self, node: str) -> bool:
        return self._states[node].heard is None and node not in self.lost

    def _run(self) -> None:
        while not self._closing:
            for key, _ in self._selector.select(_TICK):
                if isinstance(key.data, socket.socket):
                    self._accept(key.data)
                else:
                    self._read(key.data)
            self._look()
            with self._changed:
                self._changed.notify_all()

    def _accept(self, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            link, _ = server.accept()
            # A reader that does not read must not stop the watch.
            link.settimeout(1.0)
            connection = Connection(link, _GREETING)
            self._strangers[connection] = time.monotonic()
            self._selector.register(link, selectors.EVENT_READ, connection)

    def _read(self, connection: Connection) -> None:
        try:
            messages = connection.receive()
        except OSError:
            messages = None
        if messages is None:
            self._drop(connection)
            return
        for message in messages:
            node = self._agents.get(connection)
            if node is None:
                self._greet(connection, message)
                continue
            self._states[node].heard = time.monotonic()
            self._states[node].unreached = None
            if "beat" not in message:
                self._heard(node, message)
                continue
            try:
                connection.send({"beat": message["beat"]})
            except OSError:
                self._drop(connection)
                return

    def _greet(self, connection: Connection, message: Mapping[str, Any]) -> None:
        """Accept an agent with the key, in place of an earlier agent of its node."""
        self._strangers.pop(connection, None)
        node = str(message.get("node"))
        # Of texts, compare_digest takes ASCII only.
        given = str(message.get("key")).encode(errors="backslashreplace")
        right = secrets.compare_digest(given, self._key.encode())
        if not right or node not in self._states or node in self.lost:
            # The agent of a node that was given up stays: if the link of this host was cut, Slurm may end
            # this program, and then only an agent can requeue the job.
            if not right:
                # An agent of an earlier batch step.
                with contextlib.suppress(OSError):
                    connection.send({"do": "end"})
            self._drop(connection)
            return
        connection.most = None
        state = self._states[node]
        if state.connection is not None:
            self._drop(state.connection)
        self._agents[connection] = node
        state.connection, state.address = connection, connection.link.getpeername()[0]
        state.door, state.heard, state.unreached = int(message["door"]), time.monotonic(), None

    def _drop(self, connection: Connection) -> None:
        node = self._agents.pop(connection, None)
        if node is not None:
            self._states[node].connection = None
        self._strangers.pop(connection, None)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection.link)
        connection.link.close()

    def _look(self) -> None:
        now = time.monotonic()
        for connection, since in list(self._strangers.items()):
            if now - since > self._limits.silence:
                self._drop(connection)
        if self._step is not None and (words := self._step.ended()) is not None:
            self._step.close()
            self._step = None
            missing = [node for node in self.nodes if self._is_unknown(node)]
            self._say_unwatched(missing, " ".join(words.split())[-300:] or _ENDED)
        if self._patience_ends is not None and now > self._patience_ends:
            self._patience_ends = None
            silent = [node for node in self.nodes if self._is_unknown(node)]
            self._say_unwatched(silent, "the agent there does not connect; is a port closed?")
        self._give_up_without_agent(now)
        for node, state in self._states.items():
            if node in self.lost or state.heard is None:
                continue
            late = now - state.heard > self._limits.silence / 2
            if (late or state.connection is None) and not state.probed:
                state.probed = True
                threading.Thread(target=self._probe, args=(state,), daemon=True).start()
            if node == self._own or not is_lost(state, now, self._limits):
                continue
            if not is_cut_off(self._states, self._own, self._answers):
                reason = (
                    f"no heartbeat for {now - state.heard:.0f} s, and its network does not answer"
                )
                self._set_lost(node, reason)

    def _give_up_without_agent(self, now: float) -> None:
        """End the watch of nodes that answer without an agent."""
        ended = [
            node
            for node, state in self._states.items()
            if node not in self.lost and state.connection is None and state.unreached is None
            # A busy host may be late: only a probe after the silence shows that the node is up.
            if is_silent(state, state.answered, self._limits)
        ]
        for node in ended:
            self._states[node].heard = None
        self._say_unwatched(ended, _ENDED)

    def _probe(self, state: NodeState) -> None:
        """Ask the kernel of a node for an answer; runs in a thread."""
        began = time.monotonic()
        answer = kernel_answers(state.address, state.door, self._limits.unreached)
        if answer is False:
            state.unreached = state.unreached or began
        else:
            state.answered = began
            state.unreached = None if answer else state.unreached
        time.sleep(_TICK)
        state.probed = False

    def _set_lost(self, node: str, reason: str) -> None:
        state = self._states[node]
        if state.connection is not None:
            self._drop(state.connection)
        self._lose(node, reason)
        # Last: a reader of this expects the event in the log.
        self.lost[node] = reason
