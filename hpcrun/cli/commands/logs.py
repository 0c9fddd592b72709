"""Show the output of a run's ranks: all ranks and attempts, merged in time order.

Each line begins with its rank and, after a restart, the number of the restart.
Lines of `run` report starts and ends, and the output of the batch script. The
time of a line comes from its text or from its step; a line without a time
follows the line before it in the file.

-f follows the run across restarts, and stamps lines with the time of reading;
Ctrl-C ends the command, not the run. Control characters are shown as escapes,
and a progress bar as its last state; the run's folder logs/ has the raw bytes.
Under torchrun and accelerate a file holds all ranks of a node: its lines are
marked with the node, and --rank takes the number of a node.
"""

import argparse
import functools
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

from hpcrun.api.logs import (
    BatchLog,
    MergedLine,
    RankLog,
    attempts_of,
    event_lines,
    merged,
    number_of,
    rank_files,
    require_log,
    step_times,
    up_to,
)
from hpcrun.cli.arguments import add_run, find_run
from hpcrun.cli.follow import Tail
from hpcrun.config import load_resolved
from hpcrun.errors import UserError
from hpcrun.exit_codes import INTERRUPTED
from hpcrun.printing import say, say_aside
from hpcrun.run.attempt import Attempt
from hpcrun.run.directory import RunDirectory
from hpcrun.run.journal.events import Event
from hpcrun.run.journal.journal import Journal
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


def run(arguments: argparse.Namespace) -> int:
    """Print the log, and follow it with --follow."""
    rank = _rank(arguments.rank)
    directory = find_run(arguments)
    _require_log(directory, rank, arguments.follow)
    try:
        _Reader(directory, rank).tell(arguments.follow, arguments.tail)
    except KeyboardInterrupt:
        if jobs.state(directory).live:
            say_aside(f"hpcrun: {directory.name} continues to run")
        return INTERRUPTED
    return 0


class _Reader:
    """Reads a run's logs, attempt by attempt."""

    def __init__(self, run: RunDirectory, rank: int | None) -> None:
        self._run, self._rank, self._kind = run, rank, _kind_of_files(run)
        self._steps = functools.cache(lambda: step_times(run))
        self._logs: dict[tuple[Attempt, Path], tuple[RankLog | BatchLog, Tail]] = {}
        self._width = 0

    def tell(self, follow: bool, tail: int | None) -> None:
        """Print all lines, or the last ``tail`` lines, and with ``follow`` continue until the run ends."""
        live = follow and jobs.state(self._run).live
        journal = Journal(self._run)
        state = journal.read()
        attempts = attempts_of(state)
        # The logs of the newest attempt may grow: they are read from where the last read ended.
        followed = [*attempts][-1:] if live else []
        lines = chain.from_iterable(
            self._lines(
                state.of(attempt).events,
                {attempt: began},
                attempt if attempt in followed else None,
            )
            for attempt, began in attempts.items()
        )
        self._say(lines if tail is None else deque(lines, tail))
        asked = time.monotonic()
        while live:
            time.sleep(_POLL)
            if time.monotonic() - asked > _ASK:
                asked, live = time.monotonic(), jobs.state(self._run).live
            now, shown, state = time.time(), len(state.events), journal.read()
            attempts = attempts_of(state)
            newest = [*attempts][-1:]
            mine = {attempt: attempts[attempt] for attempt in dict.fromkeys([*followed, *newest])}
            grows, followed = newest[0] if live and newest else None, newest
            self._say(self._lines(state.events[shown:], mine, grows, now))

    def _lines(
        self,
        events: Sequence[Event],
        attempts: Mapping[Attempt, float],
        grows: Attempt | None,
        now: float | None = None,
    ) -> Iterator[MergedLine]:
        """Return ``events`` and the lines of ``attempts`` since the last call.

        Args:
            grows: the attempt whose last lines may be unfinished.
            now: the time for lines without a time in their text; None: no time.
        """
        batch: list[Iterator[tuple[float, MergedLine]]] = []
        streams = [event_lines(events)]
        for attempt, began in attempts.items():
            # The batch script's lines have no time: they are merged right before the newest event.
            times = [event.time for event in events if event.attempt == attempt]
            for path, source in self._sources(attempt, began, max(times, default=began)).items():
                log, tail = self._logs.setdefault((attempt, path), (source, Tail(path)))
                lines = log.keyed(tail.read(ended=attempt != grows), now)
                (batch if isinstance(log, BatchLog) else streams).append(lines)
        return merged([*batch, *streams])

    def _sources(
        self, attempt: Attempt, began: float, batch_time: float
    ) -> dict[Path, RankLog | BatchLog]:
        """Return the logs of ``attempt``; ``batch_time``: the time of the batch script's lines."""
        found: dict[Path, RankLog | BatchLog] = {}
        if self._rank is None:
            path = self._run.batch_log(attempt.job)
            if path.is_file():
                found[path] = BatchLog(self._run, attempt, batch_time)
        for path in self._files(attempt):
            found[path] = RankLog(path, attempt, began, self._kind, self._steps)
        return found

    def _files(self, attempt: Attempt) -> list[Path]:
        files = rank_files(self._run, attempt)
        if files:
            self._width = max(self._width, len(f"rank {number_of(files[-1])}"))
        return [path for path in files if self._rank in (None, number_of(path))]

    def _say(self, lines: Iterable[MergedLine]) -> None:
        shown: list[str] = []
        for line in lines:
            shown.append(line.shown(self._width))
            if len(shown) >= _CHUNK:
                say(*shown)
                shown.clear()
        say(*shown)


def _kind_of_files(run: RunDirectory) -> str:
    """Return ``node`` if a launcher has started the ranks of each node; else ``rank``."""
    try:
        config = load_resolved(run.config)
    except UserError:
        # A damaged config must not prevent reading the logs.
        return "rank"
    return "node" if config.command and config.job.launcher else "rank"


def _rank(text: str) -> int | None:
    if text == "all":
        return None
    if not (text.isascii() and text.isdigit()):
        raise UserError(f"--rank {text}: give the number of a rank, or all")
    return int(text)


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"{text}: should be a whole number of lines, 0 or more")
    return int(text)


def _require_log(run: RunDirectory, rank: int | None, following: bool) -> None:
    if following and jobs.state(run).live:
        ranks = load_resolved(run.config).job.world_size
        if rank is not None and rank >= ranks:
            raise UserError(f"--rank {rank}: {run.name} has {up_to(ranks)}")
        return
    if rank is not None:
        require_log(run, rank)
        return
    attempts = attempts_of(Journal(run).read())
    batch = any(run.batch_log(one.job).exists() for one in attempts)
    if not batch and not any(rank_files(run, one) for one in attempts):
        require_log(run, None)
