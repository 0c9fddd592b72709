"""The rank for which a hanging collective waits, from the messages of torch's watchdogs."""

import re
from collections.abc import Collection

_POSITION = re.compile(
    r"Rank (?P<rank>\d+)\].*last enqueued (?:NCCL )?work: (?P<enqueued>-?\d+), "
    r"last completed (?:NCCL )?work: (?P<completed>-?\d+)"
)
_TIMED_OUT = re.compile(
    r"Rank (?P<rank>\d+)\].*Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(?P<seq>\d+), "
    r"OpType=(?P<op>\w+)"
)
_MOST_NAMED = 8


class Positions:
    """The newest collectives of each rank."""

    def __init__(self) -> None:
        self._enqueued: dict[int, int] = {}
        self._operations: dict[tuple[int, str], set[int]] = {}

    def add(self, text: str) -> None:
        """Read a line of a log."""
        found = _POSITION.search(text)
        if found:
            rank = int(found["rank"])
            self._enqueued[rank] = max(int(found["enqueued"]), self._enqueued.get(rank, -1))
        found = _TIMED_OUT.search(text)
        if found:
            self._operations.setdefault((int(found["seq"]), found["op"]), set()).add(
                int(found["rank"])
            )

    def told(self, ranks: Collection[int]) -> tuple[list[int], str] | None:
        """Return the ranks for which others waited, and a sentence about them; None if nothing shows it.

        Args:
            ranks: all known ranks.
        """
        if not self._operations and not self._enqueued:
            return None
        spoken = set(self._enqueued).union(*self._operations.values())
        silent = sorted(set(ranks) - spoken)
        if silent:
            return (
                silent,
                f"{_named(silent)} reported no time-out: the other ranks may have waited for it",
            )
        least, most = (
            min(self._enqueued.values(), default=0),
            max(self._enqueued.values(), default=0),
        )
        if least < most:
            behind = sorted(rank for rank, at in self._enqueued.items() if at == least)
            return behind, f"{_named(behind)} had begun collective {least}, and others {most}"
        if len({seq for seq, _ in self._operations}) > 1:
            (first, op), who = min(self._operations.items(), key=lambda item: item[0][0])
            return sorted(who), f"{_named(sorted(who))} waited in collective {first} ({op})"
        return None


def _named(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = f" and {len(ranks) - _MOST_NAMED} more" if len(ranks) > _MOST_NAMED else ""
    return f"ranks {', '.join(map(str, ranks[:_MOST_NAMED]))}{more}"
