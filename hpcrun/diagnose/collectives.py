"""The collectives that each rank began before the job hung, from the lines of torch's watchdogs.

Positions (sequence numbers) count within a process group, so only ranks of one group are compared. A watchdog
prints the rank within its group; the label before the message has the global rank.
"""

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from hpcrun.diagnose.stacks import ranges

_MEMBER = re.compile(r"\[(?:PG (?:ID \S+ PG GUID )?(?P<group>[^\][]*?) )?Rank (?P<rank>\d+)\]")
_BEGUN = re.compile(r"last enqueued (?:NCCL )?work: (?P<at>-?\d+)")
_TIMED_OUT = re.compile(
    r"(?:Watchdog caught collective operation timeout: |Work )"
    r"WorkNCCL\(SeqNum=(?P<at>\d+), (?:OpType=(?P<operation>\w+), )?(?:NumelIn=(?P<size>\d+), )?"
)
_AT_WORK = re.compile(r"detected by watchdog at work(?: sequence id)?: (?P<at>\d+)")
_BLOCKING = "timed out in blocking wait"
_NEAR = 2
"""Positions: the watchdogs report their ranks one after the other."""
_MOST_WAITING = 4


@dataclass(frozen=True)
class _Waiting:
    """The collective in which a rank waits; an empty name is not known."""

    at: int
    operation: str
    size: str
    group: str = ""

    def __str__(self) -> str:
        of = f" of {self.size} elements" if self.size else ""
        group = f"process group {self.group}, " if self.group else ""
        return f"{self.operation}{of} ({group}collective {self.at})"


def member_of(text: str) -> tuple[str, int] | None:
    """Return the process group ("" if not printed) and the rank within it of a watchdog's line, or None."""
    found = _MEMBER.search(text)
    return (found["group"] or "", int(found["rank"])) if found else None


def is_default(group: str) -> bool:
    """Return True for the group of all ranks, in which a rank within the group is the global rank."""
    return group in ("", "0") or "default_pg" in group


class Positions:
    """The newest collectives of each process group, by global rank."""

    def __init__(self) -> None:
        self._begun: dict[str, dict[int, int]] = {}
        self._timed_out: dict[str, dict[int, int]] = {}
        self._members: dict[tuple[str, int], int] = {}
        # Groups that the lines do not tell apart: several groups with one name, or without a name.
        self._unclear: set[str] = set()
        self._waiting: dict[int, _Waiting] = {}
        self._blocking = False

    def add(self, text: str, rank: int | None) -> None:
        """Read a line of a log; ``rank`` is its global rank. A line without a rank is ignored."""
        member, begun, timed_out = member_of(text), _BEGUN.search(text), _TIMED_OUT.search(text)
        if member is None or rank is None or not (begun or timed_out):
            return
        name, within = member
        if self._members.setdefault(member, rank) != rank or (is_default(name) and rank != within):
            self._unclear.add(name)
        if begun:
            at = self._begun.setdefault(name, {})
            at[rank] = max(int(begun["at"]), at.get(rank, -1))
        waiting, work = self._waiting.get(rank), _AT_WORK.search(text)
        if timed_out:
            position = int(timed_out["at"])
            self._timed_out.setdefault(name, {}).setdefault(rank, position)
            self._blocking = self._blocking or _BLOCKING in text
            if timed_out["operation"] and waiting is None:
                size = timed_out["size"] or ""
                self._waiting[rank] = _Waiting(position, timed_out["operation"], size)
        elif waiting and work and int(work["at"]) == waiting.at and not waiting.group:
            self._waiting[rank] = replace(waiting, group=name)

    def laggards(self, ranks: Collection[int]) -> tuple[list[int], str] | None:
        """Return the global ranks for which others waited (may be empty), and a sentence; None if unclear.

        Args:
            ranks: all known ranks.
        """
        if len({name for name, _ in self._members} - {""}) > 1:
            self._unclear.add("")
        equal: tuple[list[int], str] | None = None
        for name in {name: None for name, _ in self._members if name not in self._unclear}:
            where = "" if is_default(name) else f" (process group {name})"
            for at in (self._begun.get(name, {}), self._timed_out.get(name, {})):
                least, most = min(at.values(), default=0), max(at.values(), default=0)
                if least < most:
                    behind = sorted(rank for rank in at if at[rank] == least)
                    words = (
                        f"{_named(behind)} had begun collective {least}, and others {most}{where}"
                    )
                    return behind, words
                if len(at) > 1:
                    words = f"all {len(at)} ranks that reported are at collective {most}{where}"
                    equal = equal or ([], f"{words}; none of them is behind")
        if all(is_default(name) and name not in self._unclear for name, _ in self._members):
            absent = sorted(set(ranks) - set(self._members.values()))
            if absent and self._members:
                return (
                    absent,
                    f"{_named(absent)} reported no time-out: others may have waited for it",
                )
        return equal

    def notes(self) -> list[str]:
        """Return sentences about collectives that differ between ranks, and about a blocking wait."""
        blocking = (
            "the ranks wait in a blocking way: TORCH_NCCL_BLOCKING_WAIT (or NCCL_BLOCKING_WAIT) is set; "
            "unset it, and the watchdog reports the collective of each rank"
        )
        return [*self._differing(), *([blocking] if self._blocking else [])]

    def _differing(self) -> Iterator[str]:
        waiting = dict(sorted(self._waiting.items()))
        groups: dict[str, dict[str, list[int]]] = {}
        for rank, one in waiting.items():
            groups.setdefault(one.group, {}).setdefault(str(one), []).append(rank)
        named = [group for group in groups if group]
        told = [
            f"{_named(ranks)} in {what}"
            for found in groups.values()
            for what, ranks in found.items()
        ]
        if len(named) > 1:
            yield (
                f"waiting: {'; '.join(told[:_MOST_WAITING])}: the ranks, or threads of a rank, begin the "
                "collectives of several process groups in different orders"
            )
            return
        by_position = sorted(waiting.values(), key=lambda one: one.at)
        if any(
            two.at - one.at <= _NEAR and (one.operation, one.size) != (two.operation, two.size)
            for one, two in pairwise(by_position)
        ):
            yield (
                f"waiting: {'; '.join(told[:_MOST_WAITING])}: the ranks call different collectives, mostly "
                "because a condition differs between them"
            )


def _named(numbers: list[int]) -> str:
    return f"rank{'' if len(numbers) == 1 else 's'} {ranges(numbers)}"
