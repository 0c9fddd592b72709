"""Ends a training that makes no progress, and leaves what tells why: stacks, collectives, who is behind.

A thread of each rank looks at the rank's position. The first that sees no progress raises an alarm in
the ranks' key-value store; then every rank's thread writes its stacks and says where it stands, the
first one judges the answers, and all end. Where code holds the interpreter's lock no thread runs: for
that, a process beside the rank (the sentry) waits to have the stacks written and to end the rank, and the
thread, while it runs, puts that off again and again. Time in which the job is suspended does not count.
"""

import contextlib
import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NoReturn, Protocol

from hpcrun.cluster.distributed import DistributedConfig
from hpcrun.cluster.launchers import scheduler
from hpcrun.config import Config
from hpcrun.lifecycle import exitcodes
from hpcrun.lifecycle.end.settle import settle_by_hand
from hpcrun.lifecycle.rank.sentry import Post, Sentry
from hpcrun.lifecycle.rank.stack_writer import Answering, own_stacks
from hpcrun.lifecycle.signals import kill_helpers
from hpcrun.run.directory import RunDirectory
from hpcrun.run.endings import node_name, record_hang, stacks_path
from hpcrun.run.events import Attempt, note
from hpcrun.run.io.files import make_log_folder
from hpcrun.run.stacks import Mailbox
from hpcrun.train.health import flight_recorder
from hpcrun.train.health.hang_diagnosis import Answer, judge_hang
from hpcrun.train.parallel import process_group
from hpcrun.train.phase import PREPARING, TRAINING, Position

_TORCH = f"{os.sep}torch{os.sep}"
_PREPARES = 48
"""Times ``hang_start`` for ``Task.prepare``, which may download for hours: a day, unless that is changed."""

At = Callable[[str], contextlib.AbstractContextManager[None]]
"""What a part of the work is done in: whoever looks knows its name, and collectives wait for the watchdog."""


class Store(Protocol):
    """What is used of torch's key-value stores; each call may raise RuntimeError when it has gone."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def add(self, key: str, amount: int, /) -> int: ...

    def check(self, keys: list[str], /) -> bool: ...


@dataclass(frozen=True)
class Patience:
    """Seconds without progress: in a step, where nothing says how long the work may take, in ``prepare``."""

    step: float
    other: float
    prepare: float

    @classmethod
    def of(cls, hang_after: float, hang_start: float, timeout: float) -> "Patience":
        """At most half of the collectives' ``timeout`` in a step: whoever shortens one means both."""
        step = min(hang_after, timeout / 2)
        other = max(step, hang_start)
        return cls(step, other, max(other, _PREPARES * hang_start))

    def allowed(self, position: Position) -> float:
        """What holds where a process stands: the first of its steps may compile."""
        moving = position.step is not None and position.step > position.start
        return self.step if moving and position.doing == TRAINING else self.around(position.doing)

    def around(self, work: str) -> float:
        """What holds for ``work`` beside the steps, and for the longest of these."""
        return self.prepare if work == PREPARING else self.other

    @property
    def tick(self) -> float:
        """Seconds between two looks."""
        return min(5.0, self.step / 10)

    @property
    def answer(self) -> float:
        """Seconds that the ranks have to answer an alarm."""
        return min(10.0, max(0.2, self.step / 4))

    def end(self, work: str) -> float:
        """Seconds within which whatever does not move in ``work`` has ended, whoever had to end it."""
        return self.around(work) + self.unheard + self.alarm

    @property
    def unheard(self) -> float:
        """Seconds beyond what is allowed until the sentry takes the thread for stopped."""
        return self.answer + 3 * self.tick

    @property
    def alarm(self) -> float:
        """Seconds from an alarm to the end of the process, at most."""
        return 4 * self.answer + 12 * self.tick


class Watchdog:
    """Watches this rank while it is entered as a context. Training pays nothing: it only has to move."""

    def __init__(
        self,
        position: Position,
        patience: Patience,
        folder: Path,
        *,
        rank: int,
        world_size: int,
        store: Store | None,
        farewell: Callable[[], None],
        resumed: Callable[[float], None] = lambda _: None,
    ) -> None:
        """Watch ``position``.

        Args:
            folder: the attempt's logs.
            store: this rank's own connection to the store of all; None: it watches alone.
            farewell: called before this rank ends the process, when all is written.
            resumed: called with the seconds for which this rank was suspended, once it goes on.
        """
        self._position, self._patience = position, patience
        self._folder, self._rank, self._world_size = folder, rank, world_size
        self._store, self._farewell, self._resumed = store, farewell, resumed
        self._host = node_name()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hpcrun-watchdog", daemon=True)
        self._stacks: IO[str] = sys.stderr
        self._sentry: Sentry | None = None
        self._alarmed = False

    def __enter__(self) -> "Watchdog":
        post = None
        try:
            make_log_folder(self._folder)
            # Appended to: the sentry takes out again what it has answered a request with.
            path = stacks_path(self._folder, self._rank)
            self._stacks = open(path, "w", opener=_appending)
            mail = Mailbox(self._folder, self._world_size)
            post = Post(
                *(str(mail.request), str(mail.answer(self._rank)), str(path)),
                *(self._rank, self._host, mail.pause),
            )
        except OSError as error:
            print(f"hpcrun: stacks will go to the log: {error}", file=sys.stderr, flush=True)
        try:
            self._sentry = Sentry(self._stacks, self._patience.tick, post)
        except OSError as error:
            print(
                f"hpcrun: a hang in C code and a suspension are not noticed: {error}",
                file=sys.stderr,
                flush=True,
            )
        self._tell(f"host/{self._rank}", self._host)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        # What fails during an alarm follows from it: the thread then ends the process. Otherwise it may
        # wait for a store whose rank is stopped, and this rank has its own reason to leave.
        self._thread.join(None if self._alarmed else self._patience.answer)
        if self._sentry is not None:
            self._sentry.close()
        if self._stacks is not sys.stderr:
            self._stacks.close()
            # Nothing was written: the watchdog never returns from an alarm.
            stacks_path(self._folder, self._rank).unlink(missing_ok=True)

    def _watch(self) -> None:
        seen, since = self._place(), time.monotonic()
        while True:
            # A process that was suspended has not stood still in that time.
            since += self._put_off()
            now = time.monotonic()
            place = self._place()
            if place != seen:
                seen, since = place, now
            if now - since >= self._patience.allowed(self._position) or self._asked("alarm"):
                self._end(now - since)
            if self._over.wait(self._patience.tick):
                return

    def _place(self) -> tuple[int | None, str]:
        return self._position.step, self._position.doing

    def _put_off(self) -> float:
        """Put the end by the sentry off; returns the seconds of a suspension that has just ended."""
        if self._sentry is None:
            return 0.0
        allowed = self._patience.allowed(self._position) + self._patience.unheard
        suspended = self._sentry.put_off(allowed)
        if suspended:
            self._resumed(suspended)
        return suspended

    def _end(self, idle: float) -> NoReturn:
        self._alarmed = True
        if self._sentry is not None:
            # The store may be where it hangs.
            self._sentry.put_off(self._patience.alarm)
        first = self._raise_alarm()
        step, doing = self._place()
        print(
            f"hpcrun: rank {self._rank} on {self._host}: step {step}, {doing}, "
            f"no progress for {idle:.1f} s",
            file=self._stacks,
            flush=True,
        )
        faulthandler.dump_traceback(file=self._stacks)
        mine = Answer(
            self._host,
            step,
            doing,
            idle,
            _main_place(),
            flight_recorder.dump(self._folder, self._rank),
        )
        self._tell(f"answer/{self._rank}", json.dumps(mine.as_record()))
        if first:
            self._judge(mine, idle)
            self._tell("judged", "")
        else:
            self._wait_for(["judged"], 2 * self._patience.answer + 6 * self._patience.tick)
        with contextlib.suppress(Exception):
            self._farewell()
        if self._rank == 0:
            # The store is in this process: the others shall hear that they may go.
            time.sleep(self._patience.tick)
        kill_helpers()
        os._exit(exitcodes.FAILED)

    def _raise_alarm(self) -> bool:
        """Whether this rank is the first to raise it, or alone."""
        if self._store is None:
            return True
        try:
            return self._store.add("alarm", 1) == 1
        except RuntimeError:
            self._store = None
            return True

    def _judge(self, mine: Answer, idle: float) -> None:
        ranks = range(self._world_size)
        if self._store is not None:
            self._wait_for([f"answer/{rank}" for rank in ranks], self._patience.answer)
        answers = {self._rank: mine}
        hosts: list[str | None] = []
        for rank in ranks:
            told = self._told(f"answer/{rank}")
            if told is not None:
                answers[rank] = Answer(**json.loads(told))
            hosts.append(self._told(f"host/{rank}"))
        hosts[self._rank] = self._host
        hang = judge_hang(answers, hosts, time.time(), idle)
        with contextlib.suppress(OSError):
            record_hang(self._folder, hang)
        print(f"hpcrun: {hang.line}; stacks in {self._folder}", file=sys.stderr, flush=True)
        # A rank that did not answer has its stacks written on its sentry's order, a little later.
        until = time.monotonic() + self._patience.answer + 6 * self._patience.tick
        silent = [stacks_path(self._folder, rank) for rank in ranks if rank not in answers]
        while time.monotonic() < until and not all(_written(path) for path in silent):
            time.sleep(self._patience.tick)

    def _tell(self, key: str, value: str) -> None:
        if self._store is not None:
            with contextlib.suppress(RuntimeError):
                self._store.set(key, value)

    def _told(self, key: str) -> str | None:
        return self._store.get(key).decode() if self._store and self._asked(key) else None

    def _asked(self, *keys: str) -> bool:
        """Whether all ``keys`` are there; a store that has gone with its rank is asked no more."""
        if self._store is None:
            return False
        try:
            return self._store.check(list(keys))
        except RuntimeError:
            self._store = None
            return False

    def _wait_for(self, keys: list[str], seconds: float) -> None:
        until = time.monotonic() + seconds
        while self._store is not None and time.monotonic() < until and not self._asked(*keys):
            time.sleep(self._patience.tick / 2)


@contextlib.contextmanager
def watching(
    run: RunDirectory,
    attempt: Attempt,
    config: Config,
    distributed: DistributedConfig,
    position: Position,
) -> Iterator[At]:
    """Within the block the watchdog that the config asks for; none where a person may be at a breakpoint.

    What it gives is for the parts of the work. A group that is made in one waits for the watchdog from the
    next part on.
    """
    train, rank = config.train, distributed.rank
    if config.job.executor == "debug":
        yield position.at
        return
    logs = run.attempt_logs(attempt.job, attempt.restart)
    answering = Answering(
        Mailbox(logs, distributed.world_size),
        rank,
        lambda: (position.step, position.doing),
        lambda: own_stacks(rank),
    )
    if train.hang_after is None:
        with answering:
            yield position.at
        return

    def farewell() -> None:
        # Batch scripts and the local cluster settle an attempt themselves.
        if distributed.rank == 0 and scheduler(os.environ) == "direct":
            settle_by_hand(run, attempt, exitcodes.FAILED)

    def resumed(seconds: float) -> None:
        # All ranks of a step are suspended together.
        if distributed.rank == 0:
            print(f"hpcrun: was suspended for {seconds:.0f} s; goes on", flush=True)
            note(run, "suspended", attempt, step=position.step, seconds=round(seconds, 3))

    patience = Patience.of(train.hang_after, train.hang_start, train.timeout)
    watchdog = Watchdog(
        position,
        patience,
        logs,
        rank=rank,
        world_size=distributed.world_size,
        store=process_group.second_store(distributed, f"hang-{attempt.owner}"),
        farewell=farewell,
        resumed=resumed,
    )

    @contextlib.contextmanager
    def at(work: str) -> Iterator[None]:
        # Collectives that gave up before it would name nobody, and count as a crash.
        with process_group.waiting_at_least(patience.end(work)), position.at(work):
            yield

    with answering, watchdog, process_group.waiting_at_least(patience.end(position.doing)):
        yield at


def _appending(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_APPEND, 0o600)


def _written(path: Path) -> bool:
    try:
        return path.stat().st_size > 0
    except OSError:
        return True


def _main_place() -> str:
    """The innermost line of the main thread that is not torch's own: ``task.py:33 in loss``."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    innermost = frame
    while frame is not None and _TORCH in frame.f_code.co_filename:
        frame = frame.f_back
    found = frame or innermost
    if found is None:
        return "an unknown place"
    return f"{Path(found.f_code.co_filename).name}:{found.f_lineno} in {found.f_code.co_name}"
