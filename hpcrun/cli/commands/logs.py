"""Show the output of a run's ranks: all ranks and attempts, merged in time order.

Each line begins with its rank and, after a restart, the number of the restart.
Lines of `run` report starts and ends, and the output of the batch script. The
time of a line comes from its text or from its step; a line without a time
follows the line before it in the file.

-f follows the run across restarts, and stamps lines with the time of reading;
Ctrl-C ends the command, not the run. Control characters are shown as escapes,
and a progress bar as its last state; the run's folder logs/ has the raw bytes.
Under torchrun and accelerate a file holds all ranks of a node: lines that do
not name their rank are marked with the node.
"""

import argparse
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from hpcrun.api.logs import (
    BatchLog,
    MergedLine,
    RankLog,
    StepTimes,
    attempts_of,
    event_lines,
    file_lines,
    merged,
    of_attempt,
    rank_files,
    require_log,
    up_to,
)
from hpcrun.cli.arguments import add_run, find_run
from hpcrun.cli.follow import Tail
from hpcrun.config import load_resolved
from hpcrun.diagnose.finding import FailureFinding, find_cause
from hpcrun.diagnose.run_lines import lines_of_attempt, nodes_of
from hpcrun.errors import UserError
from hpcrun.printing import say, say_aside
from hpcrun.run.directory import RunDirectory
from hpcrun.run.events import Attempt, Event, read_events
from hpcrun.slurm.launch import jobs

_POLL = 0.3
_ASK = 5.0
_CHUNK = 1000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add_run(parser)
    parser.add_argument(
        "-f", "--follow", action="store_true", help="print new lines as the logs grow"
    )
    parser.add_argument("--rank", default="all", metavar="K", help="one rank, or all (default)")
    parser.add_argument(
        "-n", "--tail", type=_count, metavar="LINES", help="begin with the last LINES lines"
    )
    parser.add_argument(
        "--grep", metavar="REGEX", help="only lines that match this Python regular expression"
    )
    parser.add_argument(
        "--errors",
        action="store_true",
        help="only the lines with the cause of the newest failure, as in `hpcrun doctor`",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the log, and follow it with --follow."""
    rank = _rank(arguments.rank)
    pattern = _pattern(arguments.grep)
    if arguments.errors and arguments.follow:
        raise UserError("--errors --follow: give only one; --errors reads the present logs once")
    directory = find_run(arguments)
    if arguments.errors:
        return _print_errors(directory)
    reader = _Reader(directory, rank, pattern)
    _require_log(directory, rank, reader, arguments.follow)
    try:
        reader.tell(arguments.follow, arguments.tail)
    except KeyboardInterrupt:
        if jobs.state(directory).live:
            say_aside(f"hpcrun: {directory.name} continues to run")
        return 130
    return 0


class _Reader:
    """Reads a run's logs, attempt by attempt."""

    def __init__(
        self, run: RunDirectory, rank: int | None, pattern: "re.Pattern[str] | None"
    ) -> None:
        self._run, self._rank, self._pattern = run, rank, pattern
        self.per_file = _ranks_of_a_file(run)
        self._steps = StepTimes(run.metrics)
        self._logs: dict[Path, tuple[RankLog | BatchLog, Tail]] = {}
        self._told = 0
        self._width = 0

    def tell(self, follow: bool, tail: int | None) -> None:
        """Print all lines, or the last ``tail`` lines, and with ``follow`` continue until the run ends."""
        live = follow and jobs.state(self._run).live
        events = read_events(self._run)
        attempts = attempts_of(events)
        # The logs of the newest attempt may grow: they are read from where the last read ended.
        newest = list(attempts)[-1:] if live else []
        lines = (
            line
            for attempt in attempts
            if attempt not in newest
            for line in self._history(events, attempt, attempts[attempt])
        )
        chosen = self._chosen(lines)
        first = self._chosen(self._new_lines(events, Tail.read)) if live else iter(())
        if tail is None:
            self._say(chosen)
            self._say(first)
        else:
            last = deque(chosen, tail)
            last.extend(first)
            self._say(last)
        asked = time.monotonic()
        while live:
            time.sleep(_POLL)
            if time.monotonic() - asked > _ASK:
                asked, live = time.monotonic(), jobs.state(self._run).live
            read = Tail.read if live else Tail.last
            now = time.time()
            self._say(self._chosen(self._new_lines(read_events(self._run), read, now)))

    def _history(
        self, events: Sequence[Event], attempt: Attempt, began: float
    ) -> Iterator[MergedLine]:
        """Yield the lines of an attempt that has ended."""
        mine = of_attempt(events, attempt)
        over = max(event.time for event in mine)
        # The batch script's lines have no time: they are merged right before the event of the end.
        streams = [
            BatchLog(self._run, path, attempt, over).keyed(file_lines(path))
            for path in self._batch_files(attempt)
        ]
        streams.append(event_lines(mine))
        streams += [
            self._log(path, attempt, began).keyed(file_lines(path)) for path in self._files(attempt)
        ]
        return merged(streams)

    def _new_lines(
        self,
        events: Sequence[Event],
        read: Callable[[Tail], Iterator[bytes]],
        now: float | None = None,
    ) -> Iterator[MergedLine]:
        """Return the lines since the last call, of the attempts that were followed and of newer attempts.

        Args:
            now: the time for lines without a time in their text; None: no time.
        """
        attempts = attempts_of(events)
        newest = list(attempts)[-1:]
        over = [path for path, (log, _) in self._logs.items() if log.attempt not in newest]
        for attempt in newest:
            for path in self._files(attempt):
                if path not in self._logs:
                    log = self._log(path, attempt, attempts[attempt])
                    self._logs[path] = log, Tail(path)
            for path in self._batch_files(attempt):
                if path not in self._logs:
                    batch = BatchLog(self._run, path, attempt, attempts[attempt])
                    self._logs[path] = batch, Tail(path)
        # The first call yields the newest attempt only: earlier attempts were printed as history.
        since = events[self._told :] if self._told else _from_opening(events, newest)
        self._told = len(events)
        streams: list[Iterator[tuple[float, MergedLine]]] = [event_lines(since)]
        for path, (source, tail) in self._logs.items():
            # No process ends the last line of an attempt that is over.
            streams.append(source.keyed((Tail.last if path in over else read)(tail), now))
        for path in over:
            del self._logs[path]
        return merged(streams)

    def _log(self, path: Path, attempt: Attempt, began: float) -> RankLog:
        return RankLog(path, attempt, began, self._steps, launched=self.per_file > 1)

    def _files(self, attempt: Attempt) -> list[Path]:
        files = rank_files(self._run, attempt)
        if files:
            most = int(files[-1].stem.removeprefix("rank-")) * self.per_file
            self._width = max(self._width, len(f"rank {most}"))
        if self._rank is None:
            return files
        wanted = f"rank-{self._rank // self.per_file:05d}.log"
        return [path for path in files if path.name == wanted]

    def _batch_files(self, attempt: Attempt) -> list[Path]:
        if self._rank is not None:
            return []
        return [path for path in self._run.batch_logs(attempt.job) if path.is_file()]

    def _chosen(self, lines: Iterable[MergedLine]) -> Iterator[MergedLine]:
        for line in lines:
            if self._rank is not None and line.rank not in (None, self._rank):
                continue
            if self._pattern is None or self._pattern.search(line.text):
                yield line

    def _say(self, lines: Iterable[MergedLine]) -> None:
        shown: list[str] = []
        for line in lines:
            shown.append(line.shown(self._width))
            if len(shown) >= _CHUNK:
                say(*shown)
                shown.clear()
        say(*shown)


def _print_errors(run: RunDirectory) -> int:
    """Print the lines that show the cause of the newest failure, and the diagnosis with its remedy."""
    events = read_events(run)
    for attempt in reversed(attempts_of(events)):
        lines = lines_of_attempt(run, attempt, events)
        finding = find_cause(lines, nodes_of(events, attempt))
        if finding is not None:
            say(*_error_lines(finding, attempt))
            say(f"hpcrun: doctor: {finding.line}", f"hpcrun: remedy: {finding.remedy}")
            return 0
    say(f"hpcrun: {run.name}: no known failure")
    return 0


def _error_lines(finding: FailureFinding, attempt: Attempt) -> Iterator[str]:
    for line in finding.evidence:
        told = MergedLine(line.time, attempt.restart, line.rank, None, f"{line.place}: {line.text}")
        yield told.shown()


def _from_opening(events: Sequence[Event], newest: Sequence[Attempt]) -> Sequence[Event]:
    """Return the events from the opening of the ``newest`` attempt on; none before the first attempt."""
    for index in range(len(events) - 1, -1, -1):
        if events[index].what == "opened" and events[index].attempt in newest:
            return events[index:]
    return ()


def _ranks_of_a_file(run: RunDirectory) -> int:
    """Return how many ranks a launcher has started in each task; 1 where each rank has its own log."""
    try:
        config = load_resolved(run.config)
    except UserError:
        # A damaged config must not prevent reading the logs.
        return 1
    return config.job.gpus if config.command and config.job.launcher else 1


def _rank(text: str) -> int | None:
    if text == "all":
        return None
    if not (text.isascii() and text.isdigit()):
        raise UserError(f"--rank {text}: give the number of a rank, or all")
    return int(text)


def _pattern(text: str | None) -> "re.Pattern[str] | None":
    if text is None:
        return None
    try:
        return re.compile(text)
    except re.error as error:
        raise UserError(f"--grep {text}: not a regular expression: {error}") from None


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"{text}: should be a whole number of lines, 0 or more")
    return int(text)


def _require_log(run: RunDirectory, rank: int | None, reader: _Reader, following: bool) -> None:
    if following and jobs.state(run).live:
        ranks = load_resolved(run.config).job.world_size * reader.per_file
        if rank is not None and rank >= ranks:
            raise UserError(f"--rank {rank}: {run.name} has {up_to(ranks)}")
        return
    attempts = attempts_of(read_events(run))
    if rank is None and any(rank_files(run, one) for one in attempts):
        return
    if rank is None and any(path.exists() for one in attempts for path in run.batch_logs(one.job)):
        return
    require_log(run, None if rank is None else rank // reader.per_file)
