"""Slow, lost and replaced nodes of a run, from its event log; ranks of other nodes wait for a slow node."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hpcrun.run.events import Attempt, Event

BEGUN, OVER = "slow", "slow-over"
"""Events: a node has become slow, and is no longer slow."""

STOPPED = "slow-node"
"""Cause of the event ``stopped`` if the ranks stopped so that another node takes the place of a slow node."""


@dataclass(frozen=True)
class SlowNode:
    """A node that was slow from step ``since`` to step ``until``; None: to the end of its attempt, or still.

    ``rank``: its slowest rank. ``ratio``: the time of this rank's own work in a step, divided by the median
    of the other nodes (of the other ranks, if there is one node).
    """

    host: str
    rank: int
    ratio: float
    since: int
    until: int | None = None

    @property
    def line(self) -> str:
        """One line for a person."""
        steps = f"since step {self.since}" if self.until is None else self.steps
        return (
            f"{self.host} is slow: rank {self.rank} takes {self.ratio:.2f} times as long as the others for "
            f"data and forward pass, {steps}"
        )

    @property
    def steps(self) -> str:
        """The steps in which the node was slow."""
        end = "the end of the attempt" if self.until is None else f"step {self.until}"
        return f"step {self.since} to {end}"


def slow_nodes(events: Sequence[Event]) -> list[SlowNode]:
    """Return all slow nodes of a run, in the order in which they became slow."""
    found: list[SlowNode] = []
    places: dict[tuple[Attempt | None, str], int] = {}
    for event in events:
        host = str(event.fields.get("host"))
        key = event.attempt, host
        if event.what == BEGUN and (one := _node(event.fields, host, event.step)) is not None:
            places[key] = len(found)
            found.append(one)
        elif event.what == OVER and key in places:
            place = places.pop(key)
            found[place] = replace(found[place], until=event.step)
    return found


def slow_now(events: Sequence[Event]) -> list[SlowNode]:
    """Return the nodes that are slow at the end of the newest attempt that has begun."""
    begun = [event.attempt for event in events if event.what == "opened"]
    newest = [event for event in events if begun and event.attempt == begun[-1]]
    return [one for one in slow_nodes(newest) if one.until is None]


def replaced_hosts(events: Sequence[Event]) -> set[str]:
    """Return the nodes that a stop of the ranks has already replaced."""
    stops = [event for event in events if event.what == "stopped" and event.cause == STOPPED]
    return {str(host) for event in stops for host in event.fields.get("hosts", ())}


def _node(fields: dict[str, Any], host: str, step: int | None) -> SlowNode | None:
    """Return the node of an event; None if a person has damaged the event."""
    rank, ratio = fields.get("rank"), fields.get("ratio")
    if not isinstance(rank, int) or not isinstance(ratio, int | float) or step is None:
        return None
    return SlowNode(host, rank, float(ratio), step)


def replaced_now(events: Sequence[Event]) -> list[str]:
    """Return a line for each node that the newest start of the newest job has replaced or lost."""
    started = [event.attempt for event in events if event.attempt is not None]
    if not started:
        return []
    mine = (event for event in events if event.attempt and event.attempt.is_of_start(started[-1]))
    return [line for event in mine for line in _replacement(event)]


def _replacement(event: Event) -> Iterator[str]:
    facts = event.fields
    host, by, reason = (
        facts.get("host"),
        facts.get("by"),
        facts.get("reason") or "no reason is recorded",
    )
    if event.what == "replaced":
        place = f"was replaced by {by}" if by else "is used no more"
        yield f"{facts.get('lost')} {place}: {reason}"
    elif event.what == "spare-lost":
        yield f"the spare node {host} was lost: {reason}"
    elif event.what == "spare-unfit":
        yield f"the spare node {host} is unfit: {reason}"
