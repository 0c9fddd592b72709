"""The logs of all ranks and the event log of a run, merged by time.

The files of the ranks hold what the ranks print, and most lines have no time. A line gets a time where its
text has one (``logging``, NCCL, glog), or where it reports a step that metrics.jsonl has with a time. Every
other line follows the line before it in its file.
"""

import heapq
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcrun.diagnose.read_log import labeled
from hpcrun.diagnose.run_lines import names_another_run
from hpcrun.errors import UserError
from hpcrun.printing import logged
from hpcrun.run.directory import RunDirectory
from hpcrun.run.events import Attempt, Event, read_events, signature
from hpcrun.run.files import read_json, read_lines
from hpcrun.slurm.launch import jobs

# The lines of `hpcrun.run.events`: "step 12/100: loss …", "step 12: validation loss …".
_STEP = re.compile(r"step (\d+)(?:/\d+)?: ")
# Clocks of nodes differ, and a text may name any date: only times near the attempt count.
_EARLY, _LATE = 3600.0, 3600.0
# The first line of an attempt in the output of its batch script.
_MARK = "hpcrun: attempt "
_RANK_FILE = re.compile(r"rank-(\d+)\.log")


@dataclass(frozen=True)
class MergedLine:
    """A line with its origin.

    ``time``: Unix seconds; None if unknown. ``rank``: None for an event of the run. ``node``: number of the
    node of the launcher that wrote the line, if the rank is not known.
    """

    time: float | None
    attempt: Attempt
    rank: int | None
    node: int | None
    text: str

    @property
    def origin(self) -> str:
        """The writer in words, such as ``rank 3, restart 1``."""
        if self.rank is not None:
            name = f"rank {self.rank}"
        else:
            name = "run" if self.node is None else f"node {self.node}"
        label = self.attempt.label
        return name if label == "0" else f"{name}, restart {label}"

    def shown(self, width: int = 0) -> str:
        """Return the line as it is printed, with the origin in ``width`` columns."""
        clock = "" if self.time is None else time.strftime("%H:%M:%S", time.localtime(self.time))
        return f"{clock:8} {self.origin:{width}} | {self.text}"


class StepTimes:
    """The times of steps in metrics.jsonl, read at the first question."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._times: dict[tuple[str, int], float] = {}
        self._read: tuple[int, int, int] | None = None

    def of(self, attempt: str, step: int) -> float | None:
        """Return when rank 0 logged ``step`` (Unix seconds), or None."""
        # A program may print steps that metrics.jsonl lacks: the file is read again only if it grew.
        if (attempt, step) not in self._times and (now := signature(self._path)) != self._read:
            self._times, self._read = dict(_step_times(read_lines(self._path))), now
        return self._times.get((attempt, step))


class RankLog:
    """The log file of a rank, or of a node's launcher; its lines get their times in the order of the file.

    Args:
        launched: the file is that of a launcher such as torchrun, with the lines of several ranks.
        began: the start of the attempt, in Unix seconds.
    """

    def __init__(
        self, path: Path, attempt: Attempt, began: float, steps: StepTimes, *, launched: bool
    ) -> None:
        self.path, self.attempt, self._began, self._steps = path, attempt, began, steps
        self._launched = launched
        found = _RANK_FILE.fullmatch(path.name)
        self._number = int(found[1]) if found else 0
        self._at = began

    def keyed(
        self, lines: Iterable[bytes], read_at: float | None = None
    ) -> Iterator[tuple[float, MergedLine]]:
        """Yield ``lines`` with the times by which they are merged, which never fall.

        Args:
            read_at: the time of reading, when a person follows the log; used for lines without a time.
        """
        for raw in lines:
            # A launcher's file has lines of several ranks; torch's label names the rank of a line.
            line = labeled(logged(raw), self.path.name, 0)
            own = self._time(line.text, line.time)
            if own is not None or read_at is not None:
                own = own if own is not None else read_at
                assert own is not None
                self._at = max(self._at, own)
            rank = line.rank if self._launched else self._number
            node = self._number if self._launched and rank is None else None
            text = line.text if self._launched and line.rank is not None else logged(raw)
            yield self._at, MergedLine(own, self.attempt, rank, node, text)

    def _time(self, text: str, own: float | None) -> float | None:
        if own is None and self._number == 0 and (step := _STEP.match(text)):
            own = self._steps.of(self.attempt.label, int(step[1]))
        if own is None or not self._began - _EARLY <= own <= time.time() + _LATE:
            return None
        return own


class BatchLog:
    """The lines of one attempt in the output of a batch script, which other attempts and runs may share.

    Args:
        at: the time by which the lines are merged, in Unix seconds: they have none.
    """

    def __init__(self, run: RunDirectory, path: Path, attempt: Attempt, at: float) -> None:
        self.path, self.attempt = path, attempt
        self._run, self._at, self._mine = run, at, False

    def keyed(
        self, lines: Iterable[bytes], read_at: float | None = None
    ) -> Iterator[tuple[float, MergedLine]]:
        """Yield the lines as :meth:`RankLog.keyed` does."""
        self._at = max(self._at, read_at or 0.0)
        for raw in lines:
            text = logged(raw)
            if text.startswith(_MARK):
                self._mine = text.startswith(f"{_MARK}{self.attempt.owner} ")
            elif self._mine and not names_another_run(self._run, text):
                yield self._at, MergedLine(read_at, self.attempt, None, None, text)


def merged(streams: Iterable[Iterable[tuple[float, MergedLine]]]) -> Iterator[MergedLine]:
    """Yield the lines of all ``streams`` in the order of their times; lines of one stream keep theirs."""
    for _, line in heapq.merge(*streams, key=lambda pair: pair[0]):
        yield line


def attempts_of(events: Sequence[Event]) -> dict[Attempt, float]:
    """Return the attempts, each with the time (Unix seconds) of its opening, or else of its end."""
    found: dict[Attempt, float] = {}
    for event in events:
        if event.attempt is not None and event.what in ("opened", "ended"):
            found.setdefault(event.attempt, event.time)
    return found


def event_lines(events: Iterable[Event]) -> Iterator[tuple[float, MergedLine]]:
    """Yield a line for each of the ``events`` that explains the log to its reader."""
    at = 0.0
    for event in events:
        words = _WORDS.get(event.what)
        if words is None or event.attempt is None:
            continue
        at = max(at, event.time)
        line = MergedLine(event.time, event.attempt, None, None, words(event))
        yield at, line


def rank_files(run: RunDirectory, attempt: Attempt) -> list[Path]:
    """Return the log files of the ranks of ``attempt``, in the order of ranks."""
    files = run.attempt_logs(attempt).glob("rank-*.log")
    return sorted(path for path in files if _RANK_FILE.fullmatch(path.name))


def _step_times(lines: Iterable[Mapping[str, Any]]) -> Iterator[tuple[tuple[str, int], float]]:
    for line in lines:
        step, when, restart = line.get("step"), line.get("time"), line.get("restart", 0)
        if isinstance(step, int) and isinstance(when, int | float) and isinstance(restart, int):
            attempt = Attempt("", restart, int(line.get("in_place") or 0))
            yield (attempt.label, step), float(when)


def _opened(event: Event) -> str:
    day = time.strftime("%Y-%m-%d", time.localtime(event.time))
    nodes, attempt = event.fields.get("nodes"), event.attempt
    assert attempt is not None
    where = f" on {nodes} node{'s' * (nodes != 1)}" if isinstance(nodes, int) else ""
    how = " inside the allocation" if attempt.in_place else ""
    return f"attempt {attempt.owner} begins{how}{where}, {day}"


def _ended(event: Event) -> str:
    reason = event.fields.get("reason")
    reported = f"attempt ends: {event.cause}" + (f": {reason}" if reason else "")
    return f"{reported}; it starts again" if event.fields.get("restart_allowed") else reported


_WORDS: Mapping[str, Callable[[Event], str]] = {
    "opened": _opened,
    # The step of a script is unknown unless the script reports it.
    "stopped": lambda event: "stops" + (f" at step {event.step}" if event.step is not None else ""),
    "suspended": lambda event: f"was suspended for {event.fields.get('seconds')} s",
    "save-failed": lambda event: f"a checkpoint of step {event.step} could not be written",
    "nonfinite": lambda event: f"gradients are not finite in step {event.step}",
    "slow": lambda event: f"waits for {event.fields.get('host')}, which has become slow",
    "slow-over": lambda event: f"no longer waits for {event.fields.get('host')}",
    "preempted": lambda _: "gets the preemption signal (`hpcrun preempt`)",
    "cancelled": lambda _: "is cancelled (`hpcrun cancel`)",
    "cancel-failed": lambda _: "is not cancelled: Slurm refused the signal",
    "ended": _ended,
}


def last_attempt(run: RunDirectory) -> Attempt | None:
    """Return the newest attempt of the run that has begun, or None."""
    begun = (event.attempt for event in reversed(read_events(run)) if event.what != "submitted")
    return next((attempt for attempt in begun if attempt is not None), None)


def require_log(run: RunDirectory, rank: int | None, option: str = "--rank ") -> Path:
    """Return the folder that holds the log of ``rank``, or with None the log of any rank.

    Args:
        option: the words before a rank in a message.

    Raises:
        UserError: there is no such log.
    """
    attempt = last_attempt(run)
    if attempt is None:
        raise UserError(f"{run.name}: has no log yet ({jobs.state(run).word}); look again later")
    folder = run.attempt_logs(attempt)
    ranks = len(list(folder.glob("rank-*.log")))
    if not ranks:
        why = (read_json(run.result) or {}).get("reason")
        reported = f"no rank has written a log: {why}" if why else "no rank has written a log"
        raise UserError(f"{folder}: {reported}; see the other logs in {run.logs}")
    if rank is not None and not (folder / log_name(rank)).exists():
        raise UserError(f"{option}{rank}: {run.name} has logs of {up_to(ranks)} in {folder}")
    return folder


def up_to(ranks: int) -> str:
    """Return the words for the numbers of ``ranks`` ranks."""
    return f"ranks 0 to {ranks - 1}" if ranks > 1 else "rank 0 only"


def log_name(rank: int) -> str:
    """Return the name of the log of ``rank``."""
    return f"rank-{rank:05d}.log"
