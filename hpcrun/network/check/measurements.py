"""The measurements of a check, as plain data."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

NameProblem = Literal["unresolved", "wrong", "refused", "unreachable"]


@dataclass(frozen=True)
class MeasuredNode:
    """A node that answered: its name in Slurm, its place, its listener, and its addresses with their MTUs."""

    name: str
    index: int
    port: int
    addresses: Mapping[str, int]


@dataclass(frozen=True)
class NameCheck:
    """One node's check of another node's name. ``seconds``: median round trip, None with a problem.

    ``problem``: ``wrong`` means that the address of the name is not an address of the named node, and that
    another node, or none, answers there.
    """

    resolver: str
    target: str
    address: str | None
    seconds: float | None = None
    problem: NameProblem | None = None


@dataclass(frozen=True)
class PortCheck:
    """One node's connections to the ports on which another node, ``target``, listened for the check.

    ``tried``: all of these ports, in order. ``refused``, ``unreachable``: those that failed.
    """

    node: str
    target: str
    tried: tuple[int, ...]
    refused: tuple[int, ...] = ()
    unreachable: tuple[int, ...] = ()

    @property
    def failed(self) -> tuple[int, ...]:
        """Return all ports that failed, in order."""
        return tuple(sorted(self.refused + self.unreachable))

    def as_record(self) -> dict[str, Any]:
        """Return the check as one flat JSON object, without the ports that are open."""
        return {
            "node": self.node,
            "target": self.target,
            "tried": len(self.tried),
            "refused": list(self.refused),
            "unreachable": list(self.unreachable),
        }


@dataclass(frozen=True)
class Transfer:
    """Data from one node to another in one round. ``rate`` in bit/s; None without a connection.

    ``refused``: the receiver answered, and refused. ``lost``: fraction of retransmitted segments.
    ``again_for``: the suspected node or link for which this pair was measured again, with no other pair at
    the time.
    """

    sender: str
    receiver: str
    rate: float | None
    refused: bool = False
    lost: float | None = None
    again_for: tuple[str, ...] = ()

    def as_record(self) -> dict[str, Any]:
        """Return the transfer as one flat JSON object."""
        return {
            "sender": self.sender,
            "receiver": self.receiver,
            "bits_per_second": self.rate,
            "refused": self.refused,
            "resent": self.lost,
            "again_for": list(self.again_for),
        }


@dataclass(frozen=True)
class Collective:
    """An all-reduce over ``nodes``. ``busbw``: bytes per second, None if it did not finish.

    ``problem``: the failure. ``isolated``: nodes without which the all-reduce works.
    """

    nodes: tuple[str, ...]
    backend: str
    ranks: int
    size: int | None = None
    seconds: float | None = None
    busbw: float | None = None
    problem: str | None = None
    isolated: tuple[str, ...] = ()

    def as_record(self) -> dict[str, Any]:
        """Return the collective as one flat JSON object."""
        return {
            "kind": "all-reduce",
            "nodes": list(self.nodes),
            "backend": self.backend,
            "ranks": self.ranks,
            "bytes": self.size,
            "seconds": self.seconds,
            "busbw_bytes_per_second": self.busbw,
            "problem": self.problem,
            "isolated": list(self.isolated),
        }


@dataclass
class NetworkMeasurements:
    """All measurements of a check.

    ``silent``: nodes that did not answer, and when they stopped. ``interface``: the interface on which all
    other nodes connect. ``mtus``: of the interface at which the other nodes reach a node, in bytes.
    ``ended``: all tasks ended before the check did.
    """

    nodes: list[str]
    silent: dict[str, str] = field(default_factory=dict)
    ended: bool = False
    names: list[NameCheck] = field(default_factory=list)
    interface: str | None = None
    mtus: dict[str, int] = field(default_factory=dict)
    ports: list[PortCheck] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)
    collective: Collective | None = None
    seconds: float = 0.0
    options: Mapping[str, Any] = field(default_factory=dict)
