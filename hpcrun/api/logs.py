"""The logs of all ranks and the event log of a run, merged by time.

The files of the ranks hold what the ranks print, and most lines have no time. A line gets a time where its
text has one (``logging``, NCCL, glog), or where it reports a step that metrics.jsonl has with a time. Every
other line follows the line before it in its file.
"""

import heapq
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from hpcrun.diagnose.read_log import labeled
from hpcrun.diagnose.run_lines import names_another_run
from hpcrun.errors import UserError
from hpcrun.printing import logged
from hpcrun.run.attempt import Attempt
from hpcrun.run.directory import RunDirectory
from hpcrun.run.files import read_json, read_lines
from hpcrun.run.journal.events import (
    CancelRequested,
    Ended,
    Event,
    Nonfinite,
    Opened,
    Preempted,
    SaveFailed,
    Slow,
    SlowOver,
    Stopped,
    Submitted,
    Suspended,
    Unknown,
)
from hpcrun.run.journal.journal import Journal
from hpcrun.run.journal.state import State
from hpcrun.slurm.launch import jobs

# The lines of `hpcrun.run.progress_lines`: "step 12/100: loss …", "step 12: validation loss …".
_STEP = re.compile(r"step (\d+)(?:/\d+)?: ")
# Clocks of nodes differ, and a text may name any date: only times near the attempt count.
_EARLY, _LATE = 3600.0, 3600.0
# The first line of an attempt in the output of its batch script.
_MARK = "hpcrun: attempt "


StepTimes = Mapping[tuple[str, int], float]
"""When rank 0 logged a step (Unix seconds), by the label of the attempt and the step."""


@dataclass(frozen=True)
class MergedLine:
    """A line with its origin.

    ``time``: Unix seconds; None if unknown. ``writer``: ``rank 3``; ``node 1`` of a launcher; or ``run``.
    """

    time: float | None
    attempt: Attempt
    writer: str
    text: str

    @property
    def origin(self) -> str:
        """The writer in words, such as ``rank 3, restart 1``."""
        label = self.attempt.label
        return self.writer if label == "0" else f"{self.writer}, restart {label}"

    def shown(self, width: int = 0) -> str:
        """Return the line as it is printed, with the origin in ``width`` columns."""
        clock = "" if self.time is None else time.strftime("%H:%M:%S", time.localtime(self.time))
        return f"{clock:8} {self.origin:{width}} | {self.text}"


class RankLog:
    """The log file of a rank, or of a node's launcher; its lines get their times in the order of the file.

    Args:
        kind: ``rank``, or ``node`` for the file of a launcher such as torchrun.
        began: the start of the attempt, in Unix seconds.
        steps: returns the times of steps in metrics.jsonl.
    """

    def __init__(
        self, path: Path, attempt: Attempt, began: float, kind: str, steps: Callable[[], StepTimes]
    ) -> None:
        self._attempt, self._began, self._steps, self._at = attempt, began, steps, began
        self._number = number_of(path)
        self._writer = f"{kind} {self._number}"

    def keyed(
        self, lines: Iterable[bytes], read_at: float | None = None
    ) -> Iterator[tuple[float, MergedLine]]:
        """Yield ``lines`` with the times by which they are merged, which never fall.

        Args:
            read_at: the time of reading, when a person follows the log; used for lines without a time.
        """
        for raw in lines:
            text = logged(raw)
            own = self._time(text)
            own = read_at if own is None else own
            self._at = max(self._at, own or 0.0)
            yield self._at, MergedLine(own, self._attempt, self._writer, text)

    def _time(self, text: str) -> float | None:
        own = labeled(text, "", 0).time
        if own is None and self._number == 0 and (step := _STEP.match(text)):
            own = self._steps().get((self._attempt.label, int(step[1])))
        if own is None or not self._began - _EARLY <= own <= time.time() + _LATE:
            return None
        return own


class BatchLog:
    """The lines of one attempt in the output of a batch script, which other attempts and runs may share.

    Args:
        at: the time by which the lines are merged, in Unix seconds: they have none.
    """

    def __init__(self, run: RunDirectory, attempt: Attempt, at: float) -> None:
        self._run, self._attempt, self._at, self._mine = run, attempt, at, False

    def keyed(
        self, lines: Iterable[bytes], read_at: float | None = None
    ) -> Iterator[tuple[float, MergedLine]]:
        """Yield the lines as :meth:`RankLog.keyed` does."""
        self._at = max(self._at, read_at or 0.0)
        for raw in lines:
            text = logged(raw)
            if text.startswith(_MARK):
                self._mine = text.startswith(f"{_MARK}{self._attempt.owner} ")
            elif self._mine and not names_another_run(self._run, text):
                yield self._at, MergedLine(read_at, self._attempt, "run", text)


def merged(streams: Iterable[Iterable[tuple[float, MergedLine]]]) -> Iterator[MergedLine]:
    """Yield the lines of all ``streams`` in the order of their times; lines of one stream keep theirs."""
    for _, line in heapq.merge(*streams, key=lambda pair: pair[0]):
        yield line


def attempts_of(state: State) -> dict[Attempt, float]:
    """Return the attempts, each with the time (Unix seconds) of its opening, or else of its end."""
    found: dict[Attempt, float] = {}
    for event in state.of_kind(Opened, Ended):
        if event.attempt is not None:
            found.setdefault(event.attempt, event.time)
    return found


def event_lines(events: Iterable[Event]) -> Iterator[tuple[float, MergedLine]]:
    """Yield a line for each of the ``events`` that explains the log to its reader."""
    at = 0.0
    for event in events:
        words = _in_words(event)
        if words is None or event.attempt is None:
            continue
        at = max(at, event.time)
        line = MergedLine(event.time, event.attempt, "run", words)
        yield at, line


def rank_files(run: RunDirectory, attempt: Attempt) -> list[Path]:
    """Return the log files of the ranks of ``attempt``, in the order of ranks."""
    return sorted(run.attempt_logs(attempt).glob("rank-[0-9]*.log"))


def number_of(path: Path) -> int:
    """Return the number of the rank, or of the launcher's node, with the log ``path``."""
    return int(path.stem.removeprefix("rank-"))


def step_times(run: RunDirectory) -> StepTimes:
    """Return the times of steps in metrics.jsonl."""
    found = {}
    for line in read_lines(run.metrics):
        step, when, restart = line.get("step"), line.get("time"), line.get("restart", 0)
        if isinstance(step, int) and isinstance(when, int | float) and isinstance(restart, int):
            attempt = Attempt("", restart, int(line.get("in_place") or 0))
            found[attempt.label, step] = float(when)
    return found


def _opened(event: Opened) -> str:
    day = time.strftime("%Y-%m-%d", time.localtime(event.time))
    nodes, attempt = event.nodes, event.attempt
    assert attempt is not None
    where = "" if nodes is None else f" on {nodes} node{'s' * (nodes != 1)}"
    how = " inside the allocation" if attempt.in_place else ""
    return f"attempt {attempt.owner} begins{how}{where}, {day}"


def _ended(event: Ended) -> str:
    reported = f"attempt ends: {event.cause}" + (f": {event.reason}" if event.reason else "")
    return f"{reported}; it starts again" if event.restart_allowed else reported


def _in_words(event: Event) -> str | None:
    """Return the words for an event that explains the log; None for another event."""
    match event:
        case Opened():
            return _opened(event)
        case Stopped(step=None):
            # The step of a script is unknown unless the script reports it.
            return "stops"
        case Stopped():
            return f"stops at step {event.step}"
        case Suspended():
            return f"was suspended for {event.seconds} s"
        case SaveFailed():
            return f"a checkpoint of step {event.step} could not be written"
        case Nonfinite():
            return f"gradients are not finite in step {event.step}"
        case Slow():
            return f"waits for {event.host}, which has become slow"
        case SlowOver():
            return f"no longer waits for {event.host}"
        case Preempted():
            return "gets the preemption signal (`hpcrun preempt`)"
        case CancelRequested():
            return "is cancelled (`hpcrun cancel`)"
        case Ended():
            return _ended(event)
    return None


def last_attempt(run: RunDirectory) -> Attempt | None:
    """Return the newest attempt of the run that has begun, or None."""
    events, before = Journal(run).read().events, Submitted | Unknown
    begun = (event.attempt for event in reversed(events) if not isinstance(event, before))
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
