"""The all-reduce over all nodes: its orders, its result, and the search for a node that makes it fail."""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from hpcrun.network.check.fleet import Fleet
from hpcrun.network.check.measurements import Collective, MeasuredNode, all_pairs

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


Works = Callable[[Sequence[Sequence[int]]], list[bool]]
"""Runs a collective in each group of nodes at the same time, and returns for each group if it worked."""

_ROUNDS_OF_PAIRS = 3


def isolate(nodes: Sequence[int], works: Works) -> list[int]:
    """Return the nodes that make a collective fail, after it has failed over all ``nodes``.

    Each step halves the groups that fail, and runs the halves together: 1000 nodes take ten steps. A group of
    one node gets a working node as its partner. If both halves of a group work, no node is returned: the
    fault is then between nodes, or no longer there.

    Args:
        nodes: at least two.
        works: called with groups that share no node.
    """
    good: list[int] = []
    single: list[int] = []
    failing = [list(nodes)]
    while failing:
        halves = [half for group in failing for half in _halved(group)]
        single += [half[0] for half in halves if len(half) == 1]
        several = [half for half in halves if len(half) > 1]
        failing = []
        for group, well in zip(several, works(several) if several else [], strict=True):
            if well:
                good += group
            else:
                failing.append(group)
    return sorted(_failing(single, good, works)) if single else []


def _failing(single: Sequence[int], good: Sequence[int], works: Works) -> list[int]:
    """Return those of the nodes ``single`` that do not work together with a good node."""
    partners = list(good) or _first_good(single, works)
    if not partners:
        return list(single)
    left = [node for node in single if node not in partners]
    bad: list[int] = []
    for start in range(0, len(left), len(partners)):
        groups = [
            [node, partner]
            for node, partner in zip(left[start : start + len(partners)], partners, strict=False)
        ]
        bad += [group[0] for group, well in zip(groups, works(groups), strict=True) if not well]
    return bad


def _first_good(single: Sequence[int], works: Works) -> list[int]:
    """Return nodes that work in pairs, from a few rounds of pairs; empty if no pair works."""
    for pairs in all_pairs(len(single))[:_ROUNDS_OF_PAIRS]:
        groups = [[single[a], single[b]] for a, b in pairs]
        found = [group for group, well in zip(groups, works(groups), strict=True) if well]
        if found:
            return [node for group in found for node in group]
    return []


def _halved(group: Sequence[int]) -> list[list[int]]:
    middle = (len(group) + 1) // 2
    return [part for part in (list(group[:middle]), list(group[middle:])) if part]


_PROGRAM = (sys.executable, "-m", "hpcrun.network.check.all_reduce_rank")
_LAST_WORDS = 2.0
IMPORT = 120.0
"""Seconds for the import of torch, which many nodes do at the same time from one file system."""


class _Rank:
    """One child process: its last report, and its end."""

    def __init__(self, program: Sequence[str]) -> None:
        self.said: dict[str, Any] = {}
        self._words = ""
        self._heard = threading.Condition()
        self._ended = False
        self._process = subprocess.Popen(
            list(program),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=os.environ | {"TORCH_CPP_LOG_LEVEL": "ERROR"},
        )
        self._errors = threading.Thread(target=self._read_words, daemon=True)
        self._errors.start()
        threading.Thread(target=self._read_facts, daemon=True).start()

    def wait(self, stages: Sequence[str], end: float) -> dict[str, Any]:
        """Wait for a report of ``stages``, the child's end, or the time ``end``; return the last report."""
        with self._heard:
            self._heard.wait_for(
                lambda: self._ended or self.said.get("stage") in stages, end - time.monotonic()
            )
            said = dict(self.said)
            if said.get("stage") in stages:
                return said
            if self._ended:
                # The end of the output may be read before the last line of the errors.
                self._errors.join(_LAST_WORDS)
                last = (self._words.strip().splitlines() or ["it ended without output"])[-1]
                return {"stage": "failed", "problem": last[:300], "after": said.get("stage")}
            return {"stage": "hangs", "after": said.get("stage")}

    def tell(self, order: Mapping[str, Any]) -> None:
        """Send the order to the child; do nothing if the child has ended."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()

    def close(self) -> None:
        """End the child."""
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=10)

    def _read_facts(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with contextlib.suppress(ValueError), self._heard:
                self.said = json.loads(line)
                self._heard.notify_all()
        with self._heard:
            self._ended = True
            self._heard.notify_all()

    def _read_words(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._words = (self._words + line)[-2000:]


class NodeRanks:
    """The ranks of this node, for one all-reduce at a time."""

    def __init__(self, program: Sequence[str] = _PROGRAM) -> None:
        """Prepare the ranks; ``program``: the command of a rank."""
        self._program = program
        self._started: list[_Rank] = []

    def prepare(self) -> dict[str, Any]:
        """Start a rank for each GPU, or one; return the GPUs and the port of rank 0, or a problem."""
        self.close()
        end = time.monotonic() + IMPORT
        self._started = [_Rank(self._program)]
        first = self._started[0].wait(("here",), end)
        self._started += [_Rank(self._program) for _ in range(first.get("gpus", 0) - 1)]
        said = [rank.wait(("here",), end) for rank in self._started]
        return next((one for one in said if one["stage"] != "here"), first)

    def run(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Run ``count`` ranks from number ``rank`` on; return the figures of the first, or a problem."""
        end = time.monotonic() + order["limit"]
        ranks = self._started[: order["count"]]
        for local, rank in enumerate(ranks):
            rank.tell({**order, "rank": order["rank"] + local, "local": local})
        said = [rank.wait(("done", "failed"), end) for rank in ranks]
        self.close()
        return next((one for one in said if one["stage"] != "done"), said[0])

    def close(self) -> None:
        """End all ranks."""
        for rank in self._started:
            rank.close()
        self._started = []


MIB = 1 << 20
SIZES = (1 * MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB)
"""Sizes of the all-reduce in bytes; the largest size that fits the time is measured."""


def bus_bandwidth(size: int, seconds: float, ranks: int) -> float:
    """Return the bus bandwidth in bytes per second: size / time x 2 (n - 1) / n.

    The factor makes the figure comparable with the speed of the links, whatever the number of ranks.
    """
    return size / max(seconds, 1e-9) * 2 * (ranks - 1) / ranks
