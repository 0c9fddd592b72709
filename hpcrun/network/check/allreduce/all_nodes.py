"""The all-reduce over all nodes: its orders, its result, and the search for a node that makes it fail."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from hpcrun.network.check.allreduce.bisection import isolate
from hpcrun.network.check.allreduce.node_ranks import IMPORT
from hpcrun.network.check.fleet import Fleet
from hpcrun.network.check.measurements import Collective, MeasuredNode

_GRACE = 20.0
# Each gloo rank connects to every other rank.
_CONNECTING = 0.05


class Wait(Protocol):
    """Waits for an answer of one kind from each of some nodes; returns the nodes without an answer."""

    def __call__(
        self,
        kind: str,
        waiting: set[int],
        seconds: float,
        take: Callable[[dict[str, Any]], bool],
    ) -> set[int]:
        """Wait."""


class AllReduce:
    """All-reduces over groups of nodes.

    Args:
        nodes: the nodes by index.
        addresses: the address of each node for the other nodes, by name.
        limit: seconds after which an all-reduce counts as hanging.
        seconds: for the measurement.
    """

    def __init__(
        self,
        fleet: Fleet,
        wait: Wait,
        nodes: Mapping[int, MeasuredNode],
        addresses: Mapping[str, str],
        *,
        limit: float,
        seconds: float,
    ) -> None:
        self._fleet, self._wait, self._nodes, self._addresses = fleet, wait, nodes, addresses
        self._limit, self._seconds = limit, seconds
        self._answers: dict[int, dict[str, Any]] = {}
        self._groups: dict[int, dict[str, Any]] = {}

    def run(self, indexes: Sequence[int]) -> Collective:
        """Run an all-reduce over all of ``indexes``; if it fails, bisect."""
        if self._works([indexes])[0]:
            return self._figures(indexes)
        failed = self._failure(indexes)
        isolated = isolate(indexes, self._works)
        if not isolated and self._works([indexes])[0]:
            # A failure that does not repeat has no faulty node.
            return self._figures(indexes)
        names = tuple(self._nodes[index].name for index in isolated)
        return Collective(**(vars(failed) | {"isolated": names}))

    def _works(self, groups: Sequence[Sequence[int]]) -> list[bool]:
        """Run one all-reduce in each group, all at the same time; return which groups succeeded."""
        busy = {index for group in groups for index in group}
        self._fleet.tell({"type": "prepare", "nodes": sorted(busy)})
        ready = self._ask("prepare", busy, IMPORT + _GRACE)
        self._answers = dict(ready)
        whole = [
            group
            for group in groups
            if all(ready.get(index, {}).get("stage") == "here" for index in group)
        ]
        orders = [self._order(group, ready) for group in whole]
        if orders:
            limit = max(order["limit"] for order in orders)
            self._groups |= {min(group): order for group, order in zip(whole, orders, strict=True)}
            self._fleet.tell({"type": "collective", "groups": orders})
            members = {index for group in whole for index in group}
            self._answers |= {index: {"stage": "hangs"} for index in members}
            self._answers |= self._ask("collective", members, limit + _GRACE)
        return [
            all(self._answers.get(index, {}).get("stage") == "done" for index in group)
            for group in groups
        ]

    def _ask(self, kind: str, waiting: set[int], seconds: float) -> dict[int, dict[str, Any]]:
        found: dict[int, dict[str, Any]] = {}

        def take(answer: dict[str, Any]) -> bool:
            found[answer["index"]] = answer
            return True

        self._wait(kind, set(waiting), seconds, take)
        return found

    def _order(self, group: Sequence[int], ready: Mapping[int, dict[str, Any]]) -> dict[str, Any]:
        gpus = [ready[index]["gpus"] for index in group]
        counts = gpus if all(gpus) else [1] * len(group)
        members, ranks = [], 0
        for index, count in zip(group, counts, strict=True):
            members.append([index, ranks, count])
            ranks += count
        return {
            "members": members,
            "ranks": ranks,
            "backend": "nccl" if all(gpus) else "gloo",
            "address": self._address(group[0]),
            "peers": [self._address(index) for index in (group[1], group[0])],
            "port": ready[group[0]]["port"],
            "limit": self._limit + ranks * _CONNECTING,
            "seconds": self._seconds,
        }

    def _address(self, index: int) -> str:
        return self._addresses[self._nodes[index].name]

    def _figures(self, indexes: Sequence[int]) -> Collective:
        order, first = self._groups[min(indexes)], self._answers[min(indexes)]
        return Collective(
            self._names(indexes),
            order["backend"],
            order["ranks"],
            first["bytes"],
            first["seconds"],
            first["busbw"],
        )

    def _failure(self, indexes: Sequence[int]) -> Collective:
        bad = [
            self._answers.get(index, {"stage": "hangs"})
            for index in indexes
            if self._answers.get(index, {}).get("stage") != "done"
        ]
        # The message of a failed rank explains more than the missing answers of the ranks that wait for it.
        told = next((one["problem"] for one in bad if one.get("problem")), None)
        joined = sum(one.get("after") == "joined" for one in bad)
        limit = self._limit + len(indexes) * _CONNECTING
        hangs = f"no result after {limit:.0f} s; {joined} of {len(indexes)} nodes had joined"
        order = self._groups.get(min(indexes), {"backend": "gloo", "ranks": len(indexes)})
        return Collective(
            self._names(indexes), order["backend"], order["ranks"], problem=told or hangs
        )

    def _names(self, indexes: Sequence[int]) -> tuple[str, ...]:
        return tuple(self._nodes[index].name for index in indexes)
