"""End a training that makes no progress, and record the cause: stacks, collectives, ranks that are behind.

A thread on each rank watches the rank's progress. The first rank without progress raises an alarm in the
ranks' key-value store. Every rank's thread then writes its stacks and reports its position; the first rank
diagnoses the hang, and all ranks end. Code that holds the interpreter's lock blocks the thread. Against this,
a separate watchdog process next to each rank writes the stacks and ends the rank unless the thread keeps
postponing it. Time in which the job is suspended does not count.

A rank that fails writes this to the store. Ranks that wait for it on a GPU do not see its broken connections,
so their threads end them.
"""

import contextlib
import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NoReturn

from hpcrun import exit_codes
from hpcrun.config import Config
from hpcrun.ranks.collective import Ranks
from hpcrun.ranks.distributed import DistributedConfig
from hpcrun.ranks.interfaces import NodeLinks
from hpcrun.ranks.py_spy import with_workers
from hpcrun.ranks.signals import kill_helpers
from hpcrun.ranks.watchdog_process import STOPPED, WatchdogProcess
from hpcrun.run.attempt import Attempt
from hpcrun.run.directory import RunDirectory
from hpcrun.run.endings import node_name, record_hang, stacks_path
from hpcrun.run.files import make_log_folder
from hpcrun.run.journal.events import Suspended
from hpcrun.run.journal.journal import Journal
from hpcrun.run.stacks import Answering, Mailbox, own_stacks
from hpcrun.train.health import hang_diagnosis
from hpcrun.train.health.hang_diagnosis import RankPosition, StallLimits, judge_hang
from hpcrun.train.parallel import process_group
from hpcrun.train.position import COMPILING, CONNECTING, PROFILING, Position

Store = Any
"""torch's key-value store; each request may raise RuntimeError if the store is gone."""


class Peers:
    """The notes and numbers that the ranks share; without a store, this rank is alone.

    A store that fails is not asked again: after a late answer, later answers belong to other questions.
    """

    def __init__(self, store: Store | None) -> None:
        """Use ``store``, this rank's own connection to the shared store; None: this rank is alone."""
        self._store, self._lost = store, False

    @property
    def reachable(self) -> bool:
        """True while the store answers."""
        return self._store is not None

    def awaited(self) -> bool:
        """Return True if some rank does work for which the other ranks wait in a step.

        A rank that has lost the store does not know what its peers do, so it assumes such work.
        """
        return bool(self.count("awaited", 0)) or self._lost

    def count(self, key: str, more: int) -> int | None:
        """Add to a number that the ranks share, and return it; None without a store."""
        if self._store is None:
            return None
        try:
            return int(self._store.add(key, more))
        except RuntimeError:
            self._lose_store()
            return None

    def write(self, key: str, value: str) -> None:
        """Write a note for the other ranks, if the store answers."""
        if self._store is not None:
            with contextlib.suppress(RuntimeError):
                self._store.set(key, value)

    def read(self, key: str) -> str | None:
        """Return a note; None if no rank has written it, or without a store."""
        return self._store.get(key).decode() if self._store and self.wrote(key) else None

    def wrote(self, *keys: str) -> bool:
        """Return True if all notes ``keys`` are written."""
        if self._store is None:
            return False
        try:
            return bool(self._store.check(list(keys)))
        except RuntimeError:
            self._lose_store()
            return False

    def wait_for(self, keys: list[str], seconds: float, pause: float) -> None:
        """Wait until all notes ``keys`` are written, at most ``seconds``; look every ``pause`` seconds."""
        until = time.monotonic() + seconds
        while self.reachable and time.monotonic() < until and not self.wrote(*keys):
            time.sleep(pause)

    def _lose_store(self) -> None:
        self._store, self._lost = None, True


class PeerFailure:
    """The failure of a peer, and how long this rank has outlived the peer."""

    def __init__(self, peers: Peers, limits: StallLimits) -> None:
        self._peers, self._limits = peers, limits
        self._since: float | None = None

    def outlived(self, doing: str, now: float) -> bool:
        """Return True if this rank, in the work ``doing``, must not wait longer for a failed peer.

        ``now``: seconds of a monotonic clock. The time counts from the call that first sees the failure.
        """
        if self._since is None:
            self._since = now if self._peers.wrote("failed") else None
            return False
        return now - self._since >= self._limits.survive(doing)


_TORCH = f"{os.sep}torch{os.sep}"
_CONNECT = 2.0
"""Seconds for a connection to another node: a lost segment is sent again after one second."""

_AWAITED = frozenset({COMPILING, PROFILING})
"""Work of a single rank, for which the other ranks may wait in a step."""

At = Callable[[str], contextlib.AbstractContextManager[Callable[[], None]]]
"""Context for a part of the work: it names the part, and raises the timeout of collectives in the block.

It yields a function that long work calls after each of its pieces: the limit then counts for a piece."""


class Watchdog:
    """Context manager that watches this rank. Training only updates its position, which costs nothing."""

    def __init__(
        self,
        position: Position,
        limits: StallLimits,
        folder: Path,
        ranks: Ranks,
        *,
        store: Store | None,
        on_exit: Callable[[], None],
        resumed: Callable[[float], None] = lambda _: None,
        links: NodeLinks | None = None,
        blind: bool = False,
    ) -> None:
        """Watch ``position``.

        Args:
            ranks: this rank, and the number of ranks; the watchdog uses the store instead of a group.
            links: tried after a hang in NCCL's connection.
            resumed: called after a suspension of this rank, with its seconds.
        """
        self._position, self._limits = position, limits
        self._folder, self._rank, self._world_size = folder, ranks.rank, ranks.world_size
        self._peers, self._on_exit, self._resumed = Peers(store), on_exit, resumed
        self._links, self._blind = links, blind
        self._host = node_name()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hpcrun-watchdog", daemon=True)
        self._stacks: IO[str] = sys.stderr
        self._helper: WatchdogProcess | None = None
        self._alarmed = False

    def __enter__(self) -> "Watchdog":
        try:
            make_log_folder(self._folder)
            self._stacks = stacks_path(self._folder, self._rank).open("w")
        except OSError as error:
            print(f"hpcrun: stacks will go to the log: {error}", file=sys.stderr, flush=True)
        try:
            self._helper = WatchdogProcess(self._stacks, self._limits.tick)
        except OSError as error:
            print(
                f"hpcrun: hangs in C code and suspensions will not be detected: {error}",
                file=sys.stderr,
                flush=True,
            )
        self._peers.write(f"host/{self._rank}", self._host)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._over.set()
        if kind is not None and not self._alarmed:
            self._peers.write("failed", str(self._rank))
            if self._blind and self._rank == 0 and self._peers.reachable:
                time.sleep(1.5 * self._limits.tick)
        # During an alarm, wait: the failure here is a consequence of the hang, and the thread ends the
        # process. Otherwise do not wait: the thread may wait for the store of a stopped rank.
        self._thread.join(None if self._alarmed else self._limits.answer)
        if self._helper is not None:
            self._helper.close()
        if self._stacks is not sys.stderr:
            self._stacks.close()
            # The file is empty: the watchdog never returns from an alarm.
            stacks_path(self._folder, self._rank).unlink(missing_ok=True)

    def at(self, work: str) -> contextlib.AbstractContextManager[None]:
        """Let the other nodes try to connect to this node within the block, if ``work`` is `CONNECTING`."""
        if self._links is None or work != CONNECTING:
            return contextlib.nullcontext()
        return self._links.open(self._peers.write)

    def _watch(self) -> None:
        seen, since = self._position.place(), time.monotonic()
        reported, failure = False, PeerFailure(self._peers, self._limits)
        while True:
            # Time of a suspension does not count.
            since += self._put_off()
            now = time.monotonic()
            place = self._position.place()
            if place != seen:
                seen, since = place, now
            awaited = place[1] in _AWAITED
            if awaited != reported:
                reported = awaited
                self._peers.count("awaited", 1 if awaited else -1)
            if failure.outlived(place[1], now):
                print(
                    f"hpcrun: rank {self._rank} waits for a rank that has failed; it ends",
                    file=sys.stderr,
                    flush=True,
                )
                self._leave()
            idle = now - since
            if self._limits.exceeded(
                idle, self._position, self._peers.awaited
            ) or self._peers.wrote("alarm"):
                self._end(idle)
            if self._over.wait(self._limits.tick):
                return

    def _put_off(self) -> float:
        """Postpone the watchdog process; return the seconds of a suspension that has just ended."""
        if self._helper is None:
            return 0.0
        allowed = self._limits.allowed(self._position) + self._limits.unheard
        suspended = self._helper.postpone(allowed)
        if suspended:
            self._resumed(suspended)
        return suspended

    def _end(self, idle: float) -> NoReturn:
        self._alarmed = True
        if self._helper is not None:
            # The hang may be in the store itself, so the watchdog process stays armed.
            self._helper.postpone(self._limits.alarm)
        step, doing, _ = self._position.place()
        broken = None
        # Before the alarm, after which the ranks have little time to answer.
        if self._links is not None and doing == CONNECTING:
            with contextlib.suppress(RuntimeError):  # The store may be gone.
                broken = self._links.broken(
                    self._peers.read, min(_CONNECT, self._limits.answer / 2)
                )
        first = self._raise_alarm()
        print(
            f"hpcrun: rank {self._rank} on {self._host}: step {step}, {doing}, "
            f"no progress for {idle:.1f} s",
            file=self._stacks,
            flush=True,
        )
        faulthandler.dump_traceback(file=self._stacks)
        mine = RankPosition(
            self._host,
            step,
            doing,
            idle,
            _main_place(),
            hang_diagnosis.dump(self._folder, self._rank),
            broken,
        )
        self._peers.write(f"answer/{self._rank}", json.dumps(mine.as_record()))
        if first:
            self._judge(mine, idle)
            self._peers.write("classified", "")
        else:
            patience = 2 * self._limits.answer + 6 * self._limits.tick
            self._peers.wait_for(["classified"], patience, self._limits.tick / 2)
        self._leave()

    def _leave(self) -> NoReturn:
        """End the process."""
        with contextlib.suppress(Exception):
            self._on_exit()
        if self._rank == 0:
            # The store is in this process; the other ranks still need to read it.
            time.sleep(self._limits.tick)
        kill_helpers()
        os._exit(exit_codes.FAILED)

    def _raise_alarm(self) -> bool:
        """Raise the alarm; return True if this rank is the first, or has no store."""
        return self._peers.count("alarm", 1) in (1, None)

    def _judge(self, mine: RankPosition, idle: float) -> None:
        ranks = range(self._world_size)
        self._wait_for_answers(ranks)
        answers = {self._rank: mine}
        hosts: list[str | None] = []
        for rank in ranks:
            answer = self._peers.read(f"answer/{rank}")
            if answer is not None:
                answers[rank] = RankPosition(**json.loads(answer))
            hosts.append(self._peers.read(f"host/{rank}"))
        hosts[self._rank] = self._host
        hang = judge_hang(answers, hosts, time.time(), idle)
        with contextlib.suppress(OSError):
            record_hang(self._folder, hang)
        print(f"hpcrun: {hang.line}; stacks in {self._folder}", file=sys.stderr, flush=True)
        # The watchdog process of a rank that did not answer writes the rank's stacks a little later.
        until = time.monotonic() + self._limits.answer + 6 * self._limits.tick
        silent = [stacks_path(self._folder, rank) for rank in ranks if rank not in answers]
        while time.monotonic() < until and not all(_written(path) for path in silent):
            time.sleep(self._limits.tick)

    def _wait_for_answers(self, ranks: range) -> None:
        """Wait until all ranks have answered, except those that are stopped."""
        until = time.monotonic() + self._limits.answer
        pause = self._limits.tick / 2
        self._peers.wait_for([f"answer/{rank}" for rank in ranks], pause, pause)
        while self._peers.reachable and time.monotonic() < until:
            missing = [rank for rank in ranks if not self._peers.wrote(f"answer/{rank}")]
            if all(_is_stopped(stacks_path(self._folder, rank)) for rank in missing):
                return
            time.sleep(pause)


@contextlib.contextmanager
def watching(
    run: RunDirectory,
    attempt: Attempt,
    config: Config,
    distributed: DistributedConfig,
    position: Position,
    on_exit: Callable[[], None],
) -> Iterator[At]:
    """Run the block with the configured watchdog; without a watchdog in the debug executor (breakpoints).

    ``on_exit`` is called before the watchdog ends this process.

    The context yields the context manager for the parts of the work. A process group made in one part gets
    the watchdog's timeout in the next part.
    """
    train, rank = config.train, distributed.rank
    if config.job.executor == "debug":
        yield position.at
        return
    logs = run.attempt_logs(attempt)
    answering = Answering(
        Mailbox(logs, distributed.world_size),
        rank,
        lambda: (position.step, position.doing),
        lambda: with_workers(own_stacks(rank)),
    )
    if train.hang_after is None:
        with answering:
            yield position.at
        return

    def resumed(seconds: float) -> None:
        # All ranks of a job step are suspended together.
        if distributed.rank == 0:
            print(f"hpcrun: the job was suspended for {seconds:.0f} s; continuing", flush=True)
            event = Suspended(attempt=attempt, step=position.step, seconds=round(seconds, 3))
            Journal(run).note(event)

    limits = StallLimits.of(
        train.hang_after, train.hang_start, train.timeout, train.connect_timeout
    )
    watchdog = Watchdog(
        position,
        limits,
        logs,
        Ranks(rank, distributed.world_size),
        store=process_group.second_store(distributed, f"hang-{attempt.owner}"),
        on_exit=on_exit,
        resumed=resumed,
        links=NodeLinks(distributed),
        blind=distributed.backend == "nccl",
    )

    @contextlib.contextmanager
    def at(work: str) -> Iterator[Callable[[], None]]:
        # A collective that times out before the watchdog names no rank, and counts as a crash.
        with (
            process_group.waiting_at_least(limits.end(work)),
            watchdog.at(work),
            position.at(work) as advance,
        ):
            yield advance

    with answering, watchdog, process_group.waiting_at_least(limits.end(position.doing)):
        yield at


def _written(path: Path) -> bool:
    try:
        return path.stat().st_size > 0
    except OSError:
        return True


def _is_stopped(stacks: Path) -> bool:
    """Return True if the watchdog process of a rank has written that its rank is stopped."""
    try:
        return stacks.read_text(errors="replace").startswith(STOPPED)
    except OSError:
        return False


def _main_place() -> str:
    """Return the innermost line of the main thread outside torch: ``task.py:33 in loss``."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    innermost = frame
    while frame is not None and _TORCH in frame.f_code.co_filename:
        frame = frame.f_back
    found = frame or innermost
    if found is None:
        return "an unknown place"
    return f"{Path(found.f_code.co_filename).name}:{found.f_lineno} in {found.f_code.co_name}"
