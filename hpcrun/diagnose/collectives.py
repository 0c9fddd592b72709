"""The rank for which a hanging collective waits, from the messages of torch's watchdogs.

Positions (sequence numbers) count within a process group, so only ranks of one group are compared. A watchdog
prints the rank within its group; the label before the message has the global rank.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass, field

from hpcrun.diagnose.stacks import ranges

_MEMBER = re.compile(r"\[(?:PG (?:ID \S+ PG GUID )?(?P<group>[^\][]*?) )?Rank (?P<rank>\d+)\]")
_BEGUN = re.compile(r"last enqueued (?:NCCL )?work: (?P<at>-?\d+)")
_TIMED_OUT = re.compile(
    r"Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(?P<at>\d+), "
)


def member_of(text: str) -> tuple[str, int] | None:
    """Return the process group ("" if not printed) and the rank within it of a watchdog's line, or None."""
    found = _MEMBER.search(text)
    return (found["group"] or "", int(found["rank"])) if found else None


def is_default(group: str) -> bool:
    """Return True for the group of all ranks, in which a rank within the group is the global rank."""
    return group in ("", "0") or "default_pg" in group


@dataclass
class _Group:
    """Global ranks and positions of a group, by the rank within the group."""

    ranks: dict[int, set[int]] = field(default_factory=dict)
    begun: dict[int, int] = field(default_factory=dict)
    timed_out: dict[int, int] = field(default_factory=dict)

    def named(self, members: Collection[int]) -> tuple[list[int], str]:
        """Return the known global ranks of ``members``, and words for them."""
        known = sorted(rank for member in members for rank in self.ranks.get(member, ()))
        numbers, kind = (known, "rank") if len(known) == len(members) else (members, "group rank")
        return known, f"{kind}{'' if len(numbers) == 1 else 's'} {ranges(sorted(numbers))}"


class Positions:
    """The newest collectives of each process group."""

    def __init__(self) -> None:
        self._groups: dict[str, _Group] = {}
        self._spoken: set[int] = set()
        self._subgroups = False

    def add(self, text: str, rank: int | None) -> None:
        """Read a line of a log; ``rank`` is the global rank that wrote it, if known."""
        member, begun, timed_out = member_of(text), _BEGUN.search(text), _TIMED_OUT.search(text)
        if member is None or not (begun or timed_out):
            return
        name, within = member
        group = self._groups.setdefault(name, _Group())
        known = group.ranks.setdefault(within, set())
        if rank is not None:
            known.add(rank)
            self._spoken.add(rank)
            self._subgroups |= is_default(name) and rank != within
        if begun:
            group.begun[within] = max(int(begun["at"]), group.begun.get(within, -1))
        if timed_out:
            group.timed_out.setdefault(within, int(timed_out["at"]))

    def laggards(self, ranks: Collection[int]) -> tuple[list[int], str] | None:
        """Return the global ranks for which others waited (may be empty), and a sentence; None if unclear.

        Args:
            ranks: all known ranks.
        """
        # Groups without names cannot be told apart, and neither can several groups with one name.
        unclear = self._subgroups or sum(name != "" for name in self._groups) > 1
        groups = {
            name: group
            for name, group in self._groups.items()
            if (name or not unclear) and all(len(known) < 2 for known in group.ranks.values())
        }
        equal: tuple[list[int], str] | None = None
        for name, group in groups.items():
            where = "" if is_default(name) else f" (process group {name})"
            for at in (group.begun, group.timed_out):
                least, most = min(at.values(), default=0), max(at.values(), default=0)
                if least < most:
                    known, words = group.named([rank for rank in at if at[rank] == least])
                    return known, f"{words} had begun collective {least}, and others {most}{where}"
                if len(at) > 1:
                    words = f"all {len(at)} ranks that reported are at collective {most}{where}"
                    equal = equal or ([], f"{words}; none of them is behind")
            absent = set(range(max(group.ranks))) - set(group.ranks)
            # An excerpt of a log lacks most of the ranks.
            absent = absent if len(absent) < len(group.ranks) else set()
            if not self._subgroups and all(map(is_default, self._groups)):
                absent = set(ranks) - self._spoken
                group.ranks.update((rank, {rank}) for rank in absent)
            if absent:
                known, words = group.named(absent)
                return known, f"{words} reported no time-out: others may have waited for it{where}"
        return equal
