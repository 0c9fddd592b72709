"""Slow, lost and replaced nodes of a run, from its event log; ranks of other nodes wait for a slow node."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from hpcrun.run.attempt import Attempt
from hpcrun.run.journal.events import (
    Event,
    Replaced,
    Slow,
    SlowOver,
    SpareLost,
    SpareUnfit,
    Stopped,
)
from hpcrun.run.journal.state import State

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


def slow_nodes(state: State) -> list[SlowNode]:
    """Return all slow nodes of a run, in the order in which they became slow."""
    found: list[SlowNode] = []
    places: dict[tuple[Attempt | None, str], int] = {}
    for event in state.of_kind(Slow, SlowOver):
        key = event.attempt, str(event.host)
        if isinstance(event, Slow):
            if (one := _node(event)) is not None:
                places[key] = len(found)
                found.append(one)
        elif key in places:
            place = places.pop(key)
            found[place] = replace(found[place], until=event.step)
    return found


def slow_now(state: State) -> list[SlowNode]:
    """Return the nodes that are slow at the end of the newest attempt that has begun."""
    if state.owner is None:
        return []
    return [one for one in slow_nodes(state.of(state.owner)) if one.until is None]


def replaced_hosts(state: State) -> set[str]:
    """Return the nodes that a stop of the ranks has already replaced."""
    stops = [event for event in state.of_kind(Stopped) if event.cause == STOPPED]
    return {str(host) for event in stops for host in event.hosts or ()}


def _node(event: Slow) -> SlowNode | None:
    """Return the node of an event; None if a person has damaged the event."""
    if event.rank is None or event.ratio is None or event.step is None:
        return None
    return SlowNode(str(event.host), event.rank, float(event.ratio), event.step)


def replaced_now(state: State) -> list[str]:
    """Return a line for each node that the newest start of the newest job has replaced or lost."""
    started = [event.attempt for event in state.events if event.attempt is not None]
    if not started:
        return []
    mine = (one for one in state.events if one.attempt and one.attempt.is_of_start(started[-1]))
    return [line for event in mine for line in _replacement(event)]


def _replacement(event: Event) -> Iterator[str]:
    if not isinstance(event, Replaced | SpareLost | SpareUnfit):
        return
    reason = event.reason or "no reason is recorded"
    if isinstance(event, Replaced):
        place = f"was replaced by {event.by}" if event.by else "is used no more"
        yield f"{event.lost} {place}: {reason}"
    elif isinstance(event, SpareLost):
        yield f"the spare node {event.host} was lost: {reason}"
    else:
        yield f"the spare node {event.host} is unfit: {reason}"
