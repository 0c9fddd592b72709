"""The dumps of torch's flight recorder: the collectives that each rank began before the job hung.

torch's own analyzer (``torchfrtrace``) shows more. It unpickles the dumps, and a pickle can run any program;
the reader here accepts plain values only.

Positions (sequence numbers) count within a process group, so only ranks of one group are compared. A watchdog
prints the rank within its group; the label before the message has the global rank.
"""

import io
import pickle
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from hpcrun.diagnose.stacks import ranges

_NAME = re.compile(r"^(?P<prefix>.*?)(?P<rank>\d+)$")
_LARGEST = 256 << 20
"""Maximum bytes of a dump; a dump of the default size has about 2 MB."""

Dumps = Mapping[str, Mapping[int, Mapping[str, Any]]]


class _PlainReader(pickle.Unpickler):
    """Unpickles numbers, texts, lists and dictionaries, and refuses everything else."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        """Refuse: a dump contains no objects."""
        raise pickle.UnpicklingError(f"the dump contains an object ({module_name}.{global_name})")


def read_dumps(folder: Path) -> Dumps:
    """Return the dumps in ``folder``: for each prefix of the file names, the ranks' dumps.

    Files that are not dumps are skipped, and so are files with other than plain values.
    """
    found: dict[str, dict[int, Mapping[str, Any]]] = {}
    for path in sorted(folder.glob("*")):
        named = _NAME.match(path.name)
        if named is None or not path.is_file() or path.stat().st_size > _LARGEST:
            continue
        try:
            dump = _PlainReader(io.BytesIO(path.read_bytes())).load()
        except (pickle.UnpicklingError, OSError, EOFError, ValueError, LookupError, AttributeError):
            continue
        if isinstance(dump, dict) and "entries" in dump and "pg_config" in dump:
            found.setdefault(named["prefix"], {})[int(named["rank"])] = dump
    return found


def laggards(dumps: Dumps) -> list[str]:
    """Return a sentence for each process group in which some ranks began fewer collectives than others."""
    reported = []
    for ranks in dumps.values():
        begun: dict[str, dict[int, tuple[int, str]]] = {}
        for rank, dump in ranks.items():
            for entry in dump["entries"]:
                group = str((entry.get("process_group") or [""])[0])
                at = entry.get("collective_seq_id")
                if entry.get("is_p2p") or not isinstance(at, int):
                    continue
                last = begun.setdefault(group, {}).get(rank, (-1, ""))
                begun[group][rank] = max(last, (at, str(entry.get("profiling_name", ""))))
        reported += [line for group, at in begun.items() if (line := _behind(group, at))]
    return reported


def _behind(group: str, at: Mapping[int, tuple[int, str]]) -> str | None:
    most, name = max(at.values())
    behind = sorted(rank for rank, (number, _) in at.items() if number < most)
    if not behind:
        return None
    least = min(number for number, _ in at.values())
    ranks = ", ".join(map(str, behind[:8])) + (" …" if len(behind) > 8 else "")
    return (
        f"flight recorder: {len(behind)} of {len(at)} ranks ({ranks}) had begun collective {least} of group "
        f"{group or 'default'}, and others {most} ({name})"
    )


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


class Positions:
    """The newest collectives of each process group, by global rank."""

    def __init__(self) -> None:
        self._begun: dict[str, dict[int, int]] = {}
        self._timed_out: dict[str, dict[int, int]] = {}
        self._members: dict[tuple[str, int], int] = {}
        # Groups that the lines do not tell apart: several groups with one name, or without a name.
        self._unclear: set[str] = set()

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
        if timed_out:
            self._timed_out.setdefault(name, {}).setdefault(rank, int(timed_out["at"]))

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


def _named(numbers: list[int]) -> str:
    return f"rank{'' if len(numbers) == 1 else 's'} {ranges(numbers)}"
