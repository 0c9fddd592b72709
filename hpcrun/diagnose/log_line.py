"""A line of a log, with the labels that launchers and libraries print on it."""

import re
import time
from dataclasses import dataclass

from hpcrun.diagnose.collectives import is_default, member_of

# torch's label has the global rank; any launcher, agent or log collector may print its own labels before.
_LABEL = re.compile(r"\[rank(?P<rank>\d+)\]:? ?")
_LAUNCHER = re.compile(
    # torchrun's label (the local rank), Open MPI's, `srun --label`, a script's.
    r"^.{0,40}?\[(?:default|trainer)(?P<local>\d+)(?:\|\d+)?\]:? ?"
    r"|^.{0,40}?\[1,(?P<mpi>\d+)\]<std(?:out|err)>: ?"
    r"|^\s*(?P<srun>\d{1,6}): "
    r"|^[Rr]ank ?(?P<script>\d+): "
)
# Times, pdsh's and journald's host, Kubernetes' stream, Ray's process: (pid=7, ip=10.0.0.2).
_PREFIX = re.compile(
    r"\s*(?:\d{4}-\d\d-\d\dT\S+ (?:std(?:out|err) [FP] )?"
    r"|[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d (?P<journal>\S+) [^\s\[]+(?:\[\d+\])?: "
    r"|\((?:\S+ )?pid=[^)]*\) "
    r"|(?!slurm|srun|sbatch|python|rank|epoch|step|lib)(?P<host>[a-z][a-z-]*\d[a-z0-9.-]*): )"
)
_ELASTIC = re.compile(r"^\s+rank +: (?P<rank>\d+) ")
_NODE = re.compile(
    r"^(?:\[[^\]]*\] )?(?P<nccl>[A-Za-z][\w.-]*):\d+:\d+ \[\d+\]"
    r"|srun: error: (?P<srun>[^:\s]+): tasks? (?P<tasks>[\d,-]+): "
    r"|slurmstepd-(?P<stepd>[^:\s]+):"
    r"|failed on node (?P<launch>[^:\s]+)"
    r"|Node failure on (?P<lost>[^:\s,]+)"
    r"|^\s+host +: (?P<elastic>\S+)"
)
_FIRST = 200
"""Characters at the beginning of a line that may have labels."""
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
    when, node = _time(text), None
    while prefix := _PREFIX.match(text):
        node = prefix["journal"] or prefix["host"] or node
        text = text[prefix.end() :]
    launcher = _LAUNCHER.match(text)
    label = _LABEL.search(text, 0, _FIRST) if "[rank" in text else None
    if found := label or launcher:
        text = text[found.end() :]
    if rank is None and label:
        rank = int(label["rank"])
    if rank is None and ("ank " in text or " rank" in text):
        # A rank within a smaller group is not the global rank.
        member, elastic = member_of(text), _ELASTIC.match(text)
        if member and is_default(member[0]):
            rank = member[1]
        elif elastic:
            rank = int(elastic["rank"])
    if rank is None and launcher:
        rank = int(next(number for number in launcher.groups() if number is not None))
    if ":" in text or "node" in text:
        named = _NODE.search(text)
        if named:
            tasks = named["tasks"]
            groups = {**named.groupdict(), "tasks": None}
            node = next((group for group in groups.values() if group), node)
            if rank is None and tasks and tasks.isdecimal():
                rank = int(tasks)
    return LogLine(text, file, line, rank, node, when if when is not None else _time(text))


def _time(text: str) -> float | None:
    found = _ISO.search(text, 0, 120)
    if found:
        return _seconds(f"{found[1]} {found[2]}", found[3])
    found = _GLOG.match(text)
    if found is None:
        return None
    year, rest = time.localtime().tm_year, f"{found[1]}-{found[2]} {found[3]}"
    when = _seconds(f"{year}-{rest}", found[4])
    # The label has no year.
    late = when is not None and when > time.time() + 86_400
    return _seconds(f"{year - 1}-{rest}", found[4]) if late else when


def _seconds(moment: str, fraction: str | None) -> float | None:
    try:
        whole = time.mktime(time.strptime(moment, "%Y-%m-%d %H:%M:%S"))
    except (ValueError, OverflowError):
        return None
    return whole + (float(f"0.{fraction}") if fraction else 0.0)
