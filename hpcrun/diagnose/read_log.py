"""Read logs of any size in bounded memory: only their beginning and end.

Recorded with Slurm 22.05, 24.11 and 26.05. Since 25.05 slurmstepd names the signal of a cancellation
("DUE to SIGNAL Terminated"), and its lines may lack the prefix ``slurmstepd-HOST:``.
"""

import io
import os
import re
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from hpcrun.diagnose.collectives import is_default, member_of
from hpcrun.run.endings import last_words
from hpcrun.run.failures.log_end import end_of_log, exception_line

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
    r"|\[?\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:[.,]\d+)?\]?:? (?!-)"
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
_COLOR = re.compile(r"\x1b\[[\d;?]*[A-Za-z]")
_FIRST = 200
"""Characters at the beginning of a line that may have labels."""
_ISO = re.compile(r"(\d{4}-\d\d-\d\d)[T _](\d\d:\d\d:\d\d)(?:[.,](\d{1,9}))?")
_GLOG = re.compile(r"\[?[IWEF](\d{1,2})(\d\d) (\d\d:\d\d:\d\d)\.(\d+)")


@dataclass(frozen=True)
class LogLine:
    """A line with its place and its origin, as far as known.

    ``line`` counts from 1, and is 0 for a fact that is not a line of a file. ``time``: Unix seconds.
    ``failure``: the fact is a failure, whatever its text. ``until``: the time of the last change of the file.
    ``frames``: the traceback of a record.
    """

    text: str
    file: str = "-"
    line: int = 0
    rank: int | None = None
    node: str | None = None
    time: float | None = None
    failure: bool = False
    until: float | None = None
    frames: str = ""

    @property
    def place(self) -> str:
        """The place as ``file:line``."""
        return f"{self.file}:{self.line}" if self.line else self.file


def labeled(
    text: str, file: str, line: int, rank: int | None = None, *, until: float | None = None
) -> LogLine:
    """Read rank, node and time from ``text``; ``rank``, the rank of the file, takes precedence."""
    if "\x1b" in text:
        text = _COLOR.sub("", text)
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
    when = when if when is not None else _time(text)
    return LogLine(text, file, line, rank, node, when, until=until)


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


HEAD, TAIL = 4 << 20, 32 << 20
"""Bytes: a log begins with the errors of a start, and ends with the errors of an end."""

_BLOCK = 1 << 20
_LAST = 4096
"""Lines at the end of a log: each is read, however often it repeats."""
_ALIKE, _ALIKE_OF_ONE = 1000, 100
"""Lines that differ only in their digits: the next ones are skipped."""
_SHAPE, _MOST_SHAPES = 512, 100_000
_WHO = re.compile(rb"\[?[Rr]ank[ :]?\d+|^ *\d{1,6}: |\b[a-z][a-z-]*\d+(?=[:.])|\[1,\d+\]")
_LONGEST = 16_384
"""Characters of a line: longer lines (binary data, progress bars) keep only their two ends."""

_RANK_FILE = re.compile(
    r"(?:rank|task|local_rank|stdout|stderr)[-_.]?(\d{1,6})\.(?:log|out|err|txt)$"
)


def rank_of_file(path: Path) -> int | None:
    """Return the rank in the name of a log; None if the name has none."""
    found = _RANK_FILE.search(path.name)
    return int(found[1]) if found else None


def read_log(
    path: Path, *, shown: str | None = None, head: int = HEAD, tail: int = TAIL
) -> Iterator[LogLine]:
    """Yield the lines of ``path``, at most ``head`` bytes from its beginning and ``tail`` from its end.

    Args:
        shown: the name of the file in the lines; None: ``path``.

    Raises:
        OSError: the file cannot be read.
    """
    rank = _RANK_FILE.search(path.name)
    with path.open("rb") as stream:
        until = os.fstat(stream.fileno()).st_mtime
        number = int(rank[1]) if rank else None
        name = shown or str(path)
        yield from _lines(stream, name, _Origin(number, until), head, tail)


def read_stream(
    stream: BinaryIO, name: str, *, rank: int | None = None, head: int = HEAD, tail: int = TAIL
) -> Iterator[LogLine]:
    """Read a stream that may not be a file; like :func:`read_log`."""
    return _lines(stream, name, _Origin(rank, None), head, tail)


def _lines(
    stream: BinaryIO, name: str, origin: "_Origin", head: int, tail: int
) -> Iterator[LogLine]:
    begin = bytearray()
    while len(begin) < head and (block := stream.read(min(_BLOCK, head - len(begin)))):
        begin += block
    cut = begin.rfind(b"\n") + 1
    end, skipped = _last_bytes(stream, bytes(begin[cut:]), tail)
    del begin[cut:]
    number, last = begin.count(b"\n"), end.count(b"\n")
    repeats = _Repeats()
    for at, text in enumerate(io.BytesIO(begin), 1):
        if not repeats.skip(text) or at > number + skipped + last - _LAST:
            yield _line(text.removesuffix(b"\n"), name, at, origin)
    del begin
    for at, text in enumerate(io.BytesIO(end), number + skipped + 1):
        if not repeats.skip(text) or at > number + skipped + last - _LAST:
            yield _line(text.removesuffix(b"\n"), name, at, origin)


@dataclass(frozen=True)
class _Origin:
    """The rank of a whole log, if its name has one, and the time of its last change."""

    rank: int | None
    until: float | None


class _Repeats:
    """Counts lines that differ only in their digits: of many, the first ones and the last ones say enough."""

    def __init__(self) -> None:
        self._shapes: dict[object, int] = {}

    def skip(self, raw: bytes) -> bool:
        """Return True for a line like many before, also of the same rank or node."""
        shape = raw[:_SHAPE].translate(None, b"0123456789")
        if self._count(shape) < _ALIKE:
            return False
        who = _WHO.search(raw, 0, _FIRST)
        return who is None or self._count((who[0], shape)) >= _ALIKE_OF_ONE

    def _count(self, key: object) -> int:
        count = self._shapes.get(key, 0)
        if count or len(self._shapes) < _MOST_SHAPES:
            self._shapes[key] = count + 1
        return count


def _last_bytes(stream: BinaryIO, rest: bytes, tail: int) -> tuple[bytes, int]:
    """Return the last ``tail`` bytes, and the number of line ends that were skipped."""
    blocks: deque[bytes] = deque([rest])
    size, skipped = len(rest), 0
    while block := stream.read(_BLOCK):
        blocks.append(block)
        size += len(block)
        while size - len(blocks[0]) >= tail:
            passed = blocks.popleft()
            size -= len(passed)
            skipped += passed.count(b"\n")
    return b"".join(blocks), skipped


def _line(raw: bytes, name: str, number: int, origin: _Origin) -> LogLine:
    text = raw.decode(errors="replace").rstrip("\r").replace("\r", " ")
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST // 2]} … {text[-_LONGEST // 2 :]}"
    return labeled(text, name, number, origin.rank, until=origin.until)


_EXECVE = re.compile(r"^(?P<prefix>.*)error: execve\(\): (?P<what>.+)$", re.MULTILINE)
_STEPD = re.compile(r"slurmstepd-(?P<host>[^\s:]+): $")


def words_at_exit(folder: Path, rank: int) -> str | None:
    """Return why ``rank`` exited with a code: slurmstepd's message, C++'s, or its traceback's last line."""
    text = end_of_log(folder / f"rank-{rank:05d}.log")
    unstarted = _EXECVE.search(text)
    if unstarted:
        return f"execve(): {unstarted['what']}"
    return last_words(folder, rank) or exception_line(text)


def node_without_program(folder: Path) -> tuple[str | None, str] | None:
    """Return (node, slurmstepd's message) if the ranks' program is missing on some nodes but not on all.

    The node is None if the message does not name it. None for all if every rank with a message
    failed to start, or none did.
    """
    failed: dict[str, re.Match[str]] = {}
    started = False
    for path in sorted(folder.glob("rank-*.log")):
        text = end_of_log(path)
        found = _EXECVE.search(text)
        if found:
            failed[path.name] = found
        else:
            started = started or bool(text.strip())
    if not failed or not started:
        return None
    first = next(iter(failed.values()))
    host = _STEPD.search(first["prefix"])
    return (host and host["host"]), first["what"]


_ENDED = re.compile(
    r"\*\*\* (?P<what>JOB|STEP) (?P<id>\S+) ON (?P<host>\S+) CANCELLED AT [^\s,*]+"
    r"(?: DUE (?:TO|to) (?P<why>[^*,]+?))?(?=,| \*\*\*)"
)
_REASONS = {
    "PREEMPTION": "preemption",
    "TIME LIMIT": "time-limit",
    "NODE FAILURE": "node-failure",
    # By an administrator or another program: hpcrun requeues only after it has classified the end.
    "JOB REQUEUE": "preemption",
}
# After this line Slurm itself kills tasks; their ends are not causes.
_TERMINATION = re.compile(
    r"Terminating StepId=|_step_signal: Terminating|Job step aborted|Force Terminated"
    r"|\*\*\* (?:JOB|STEP) \S+ ON \S+ CANCELLED AT "
)


def scheduler_word(batch_log: str) -> str | None:
    """Return Slurm's reason for the end (preemption, time-limit, node-failure, cancelled), or None.

    A step without a reason, or with a signal, was not ended by the scheduler: srun ends a step when a
    task fails.
    """
    for ended in _ENDED.finditer(batch_log):
        why = ended["why"]
        if why in _REASONS:
            return _REASONS[why]
        if ended["what"] == "JOB" and (why is None or why.startswith("SIGNAL ")):
            return "cancelled"
    return None


def before_termination(batch_log: str) -> str:
    """Return the lines that Slurm wrote before it began to kill tasks."""
    found = _TERMINATION.search(batch_log)
    if found is None:
        return batch_log
    return batch_log[: batch_log.rfind("\n", 0, found.start()) + 1]
