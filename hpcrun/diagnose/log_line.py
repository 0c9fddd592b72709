"""A line of a log, with the labels that launchers and libraries print on it."""

import re
import time
from dataclasses import dataclass

_RANK = re.compile(
    # torch's and torchrun's labels, Open MPI's, `srun --label`.
    r"^\s*\[(?:rank|default|trainer)(?P<label>\d+)(?:\|\d+)?\]:? ?"
    r"|^\s*\[1,(?P<mpi>\d+)\]<std(?:out|err)>:"
    r"|^\s*(?P<srun>\d{1,6}): "
)
_RANK_WITHIN = re.compile(r"\[(?:PG [^\]]*?)?Rank (?P<rank>\d+)\]|^\s+rank +: (?P<elastic>\d+) ")
_NODE = re.compile(
    r"^(?:\[[^\]]*\] )?(?P<nccl>[A-Za-z][\w.-]*):\d+:\d+ \[\d+\]"
    r"|srun: error: (?P<srun>[^:\s]+): tasks? (?P<tasks>[\d,-]+): "
    r"|slurmstepd-(?P<stepd>[^:\s]+):"
    r"|failed on node (?P<launch>[^:\s]+)"
    r"|Node failure on (?P<lost>[^:\s,]+)"
    r"|^\s+host +: (?P<elastic>\S+)"
)
_ISO = re.compile(r"(\d{4}-\d\d-\d\d)[T _](\d\d:\d\d:\d\d)(?:[.,](\d{1,9}))?")
_GLOG = re.compile(r"\[?[IWEF](\d{1,2})(\d\d) (\d\d:\d\d:\d\d)\.(\d+)")


@dataclass(frozen=True)
class LogLine:
    """A line with its place and its origin, as far as known.

    ``line`` counts from 1, and is 0 for a fact that is not a line of a file. ``time``: Unix seconds.
    ``failure``: the fact is a failure, whatever its text.
    """

    text: str
    file: str = "-"
    line: int = 0
    rank: int | None = None
    node: str | None = None
    time: float | None = None
    failure: bool = False

    @property
    def place(self) -> str:
        """The place as ``file:line``."""
        return f"{self.file}:{self.line}" if self.line else self.file


def labeled(text: str, file: str, line: int, rank: int | None = None) -> LogLine:
    """Read rank, node and time from ``text``; ``rank``, the rank of the file, takes precedence."""
    found = _RANK.match(text)
    if found:
        number = next(group for group in found.groups() if group is not None)
        rank = int(number) if rank is None else rank
        text = text[found.end() :]
    if rank is None and ("ank " in text or " rank" in text):
        within = _RANK_WITHIN.search(text)
        rank = int(within["rank"] or within["elastic"]) if within else None
    node = None
    if ":" in text or "node" in text:
        named = _NODE.search(text)
        if named:
            tasks = named["tasks"]
            groups = {**named.groupdict(), "tasks": None}
            node = next((group for group in groups.values() if group), None)
            if rank is None and tasks and tasks.isdecimal():
                rank = int(tasks)
    return LogLine(text, file, line, rank, node, _time(text))


def _time(text: str) -> float | None:
    found = _ISO.search(text, 0, 120)
    if found:
        return _seconds(f"{found[1]} {found[2]}", found[3])
    found = _GLOG.match(text)
    if found:
        now = time.localtime()
        when = _seconds(f"{now.tm_year}-{found[1]}-{found[2]} {found[3]}", found[4])
        # The label has no year.
        late = when is not None and when > time.time() + 86_400
        if late:
            return _seconds(f"{now.tm_year - 1}-{found[1]}-{found[2]} {found[3]}", found[4])
        return when
    return None


def _seconds(moment: str, fraction: str | None) -> float | None:
    try:
        whole = time.mktime(time.strptime(moment, "%Y-%m-%d %H:%M:%S"))
    except (ValueError, OverflowError):
        return None
    return whole + (float(f"0.{fraction}") if fraction else 0.0)
