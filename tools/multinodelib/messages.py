"""Messages between the hosts: one JSON object per line."""

import json
import socket
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hpcrun.errors import UserError

HELLO = "hpcrun-hosts-1"
"""The first word of node 0. Other programs, and other versions of this tool, send other words."""

_LONGEST = 1 << 20
# Hosts may have different numbers of GPUs; the section has no part in the training itself.
_OF_A_HOST = ("job",)


class Closed(Exception):
    """The other host has closed the connection, or sends no such messages."""


@dataclass(frozen=True)
class Asked:
    """What a host was asked to train: its number among ``nodes``, the path of the run, the whole config."""

    node: int
    nodes: int
    run: str
    config: dict[str, Any]

    def difference(self, other: "Asked") -> str | None:
        """Return the first difference that keeps the hosts from one training, in words; None: they agree."""
        if other.nodes != self.nodes:
            return f"--num_nodes is {self.nodes} on node {self.node} and {other.nodes} on node {other.node}"
        if not 0 < other.node < self.nodes:
            return f"--node_rank {other.node} is not one of 1 to {self.nodes - 1}"
        mine, theirs = dict(_values(self.config)), dict(_values(other.config))
        for key in sorted(mine.keys() | theirs.keys()):
            if mine.get(key) != theirs.get(key):
                here, there = json.dumps(mine.get(key)), json.dumps(theirs.get(key))
                return f"{key} is {here} on node {self.node} and {there} on node {other.node}"
        if other.run != self.run:
            return f"the run is {self.run} on node {self.node} and {other.run} on node {other.node}"
        return None


def _values(config: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        name = f"{before}{key}"
        if name in _OF_A_HOST:
            continue
        if isinstance(value, dict) and value:
            yield from _values(value, f"{name}.")
        else:
            yield name, value


class Line:
    """A connection to another host. ``address``: the address of the other host."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self._buffer = connection, b""
        self.address = str(connection.getpeername()[0]).removeprefix("::ffff:")

    def send(self, **values: Any) -> None:
        """Send one message; raises Closed."""
        try:
            self.connection.sendall(json.dumps(values).encode() + b"\n")
        except OSError as error:
            raise Closed(str(error)) from error

    def receive(self, timeout: float | None) -> dict[str, Any]:
        """Return the next message.

        Raises:
            Closed: no message came within ``timeout`` seconds, or the other side has closed the connection.
        """
        self.connection.settimeout(timeout)
        try:
            while b"\n" not in self._buffer:
                received = self.connection.recv(65536)
                if not received or len(self._buffer) > _LONGEST:
                    raise Closed("the connection is closed")
                self._buffer += received
            line, self._buffer = self._buffer.split(b"\n", 1)
            found = json.loads(line)
        except (OSError, ValueError) as error:
            raise Closed(str(error)) from error
        if not isinstance(found, dict):
            raise Closed("no message")
        return found

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()


def asked_of(message: Mapping[str, Any]) -> Asked:
    """Return what the other host was asked; raises Closed if the message does not say that."""
    try:
        return Asked(
            int(message["node"]),
            int(message["nodes"]),
            str(message["run"]),
            dict(message["config"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise Closed("no request") from error


def words_of(asked: Asked) -> dict[str, Any]:
    """Return the message with which a host sends what it was asked."""
    return asdict(asked)


def port_words(place: tuple[str, int]) -> str:
    """Return an address in words."""
    return f"{place[0]} port {place[1]}"


def require_agreement(message: Mapping[str, Any]) -> None:
    """Raise UserError with the refusal of another host, if the message is one."""
    if "refused" in message:
        raise UserError(str(message["refused"]))
