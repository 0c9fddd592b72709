"""The template: a process that is like a rank before its training, and that forks ranks.

It was started with the command, the variables and the number of CPUs of a rank, so that libraries read at
import what they read in every rank. It starts no thread and no accelerator: both would not survive a fork.
"""

import contextlib
import gc
import importlib
import json
import os
import random
import select
import signal
import socket
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcrun.descendants import die_with_parent
from hpcrun.ranks.fork_messages import TEMPLATE, BadMessage, Inbox, is_own, listen, send
from hpcrun.ranks.process_state import (
    ProcessState,
    difference,
    own_state,
    places_of_threads,
    read_state,
    replace_environment,
    shared_variables,
    take_over,
)
from hpcrun.ranks.signals import STOP

THREADS = "OMP_NUM_THREADS"
# slurmstepd signals every process of a step; this process ends with its parent.
IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri")


@dataclass(frozen=True)
class RankStart:
    """Facts about the ranks of this node, from a rank or from the caller of the fork server.

    ``threads``: their OMP_NUM_THREADS; ``cpus``: those of one rank.
    """

    state: ProcessState
    threads: str
    cpus: list[int]

    @classmethod
    def read(cls, message: dict[str, Any]) -> "RankStart":
        """Return the offer in a message; raises BadMessage."""
        try:
            cpus = [int(cpu) for cpu in message["cpus"]]
            return cls(read_state(message["state"]), str(message["threads"]), cpus)
        except (KeyError, TypeError, ValueError) as error:
            raise BadMessage(f"no offer: {error!r}") from error


def become_template(offer: RankStart, where: str, cpus: set[int]) -> str:
    """Replace this process by a template; return the reason if that is impossible.

    Args:
        where: the address at which the template listens.
        cpus: the CPUs of this process before it became a template.
    """
    if bound := places_of_threads(offer.state.environ):
        return f"{bound} is set"
    state = offer.state
    raw = state.environ.get(THREADS)
    terms = json.dumps({"where": where, "cpus": sorted(cpus), "threads": raw})
    environ = shared_variables(state.environ) | {THREADS: offer.threads, TEMPLATE: terms}
    try:
        os.chdir(state.folder)
        os.sched_setaffinity(0, offer.cpus)
        os.execve(state.python, [state.python, *state.options, *state.arguments], environ)
    except OSError as error:
        os.sched_setaffinity(0, cpus)
        return str(error)


def wait_for_ranks(imports: Callable[[], None], threads: Callable[[], str]) -> None:
    """Import what a rank needs, then fork ranks until this process is killed. Returns in each rank.

    Args:
        imports: imports the modules that a rank needs.
        threads: called in a rank before it begins; prepares the rank's variables and CPUs, and returns its
            OMP_NUM_THREADS.

    Raises:
        SystemExit: this process cannot fork ranks.
    """
    terms = json.loads(os.environ.pop(TEMPLATE))
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    environ = dict(os.environ)
    given = environ.pop(THREADS)
    if terms["threads"] is not None:
        environ[THREADS] = terms["threads"]
    cpus = os.sched_getaffinity(0)
    before = dict(os.environ)
    imports()
    changes = {name: text for name, text in os.environ.items() if before.get(name) != text}
    # As before: a rank's CPUs are compared with those of its parent.
    os.sched_setaffinity(0, terms["cpus"])
    # The library for linear algebra behind NumPy ends its threads at a fork, and starts them when needed.
    if (process := os.fork()) == 0:
        os._exit(0)
    os.waitpid(process, 0)
    if reason := _unable():
        raise SystemExit(f"hpcrun: this process cannot fork ranks: {reason}")
    sys.stdout.flush()
    sys.stderr.flush()
    gc.collect()
    gc.freeze()
    replace_environment(environ)
    state = own_state()
    try:
        listener = listen(terms["where"])
    except OSError as error:
        raise SystemExit(f"hpcrun: this process cannot fork ranks: {error}") from error
    template = _Template(listener, RankStart(state, given, sorted(cpus)), changes, threads)
    template.serve(terms["where"], set(terms["cpus"]))


def _unable() -> str | None:
    count = len(os.listdir("/proc/self/task"))  # noqa: PTH208
    if count > 1:
        return f"it has {count} threads"
    for number in os.listdir("/proc/self/fd"):  # noqa: PTH208
        with contextlib.suppress(OSError):
            path = os.readlink(f"/proc/self/fd/{number}")  # noqa: PTH115
            if path.startswith(_DEVICES):
                return f"it has opened {path}"
    if "torch" in sys.modules:
        from hpcrun.devices import accelerator

        if accelerator.is_started():
            return "it has started an accelerator"
    return None


@dataclass(eq=False)
class _Client:
    """A connection with a task.

    ``launched``: the state that the task has sent; ``differs``: what a fork cannot take over of it; ``rank``:
    the forked process; ``left``: the task has ended before its rank.
    """

    connection: socket.socket
    inbox: Inbox
    launched: ProcessState | None = None
    differs: str | None = None
    rank: int | None = None
    left: bool = False


class _Template:
    """The loop that answers ranks. It never waits for a single client."""

    def __init__(
        self,
        listener: socket.socket,
        own: RankStart,
        changes: dict[str, str],
        threads: Callable[[], str],
    ) -> None:
        self._listener, self._own, self._changes, self._threads = listener, own, changes, threads
        self._clients: dict[int, _Client] = {}
        self._poll = select.poll()
        self._wake, self._woken = os.pipe()
        for end in (self._wake, self._woken):
            os.set_blocking(end, False)
        listener.setblocking(False)
        self._kills = _kills()

    def serve(self, where: str, cpus: set[int]) -> None:
        """Answer until this process is killed; return in a forked rank only."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._woken, warn_on_full_buffer=False)
        self._poll.register(self._listener, select.POLLIN)
        self._poll.register(self._wake, select.POLLIN)
        while True:
            for descriptor, _ in self._poll.poll():
                if descriptor == self._wake:
                    os.read(self._wake, 4096)
                    self._reap()
                elif descriptor == self._listener.fileno():
                    self._accept()
                elif client := self._clients.get(descriptor):
                    offer = self._read(client)
                    if offer is not None and self._is_idle():
                        problem = become_template(offer, where, cpus)
                        print(f"hpcrun: the fork server stays as it is: {problem}", file=sys.stderr)
            if self._fork_waiting():
                return

    def _is_idle(self) -> bool:
        return all(client.rank is None for client in self._clients.values())

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            if not is_own(connection):
                connection.close()
                return
            connection.setblocking(False)
            self._clients[connection.fileno()] = _Client(connection, Inbox(connection))
            self._poll.register(connection, select.POLLIN)

    def _read(self, client: _Client) -> RankStart | None:
        """Read from a client; return its offer if this template does not suit it."""
        if client.rank is not None:
            # Only the end of the task is of interest here; the rank reads its messages.
            _kill(client.rank)
            client.left = True
            self._poll.unregister(client.connection)
            return None
        try:
            message = client.inbox.receive()
            if message is None:
                return None
            if "fork" in message:
                client.launched = read_state(message["fork"])
                client.differs = difference(self._own.state, client.launched)
                return None
            offer = RankStart.read(message["offer"])
            same = difference(self._own.state, offer.state) is None
            self._drop(client)
            return None if same and offer.threads == self._own.threads else offer
        except BlockingIOError:
            return None
        except (EOFError, OSError, BadMessage, KeyError, TypeError, ValueError):
            self._drop(client)
            return None

    def _drop(self, client: _Client) -> None:
        self._clients.pop(client.connection.fileno(), None)
        if not client.left:
            self._poll.unregister(client.connection)
        client.inbox.close()

    def _refuse(self, client: _Client, reason: str) -> None:
        with contextlib.suppress(OSError):
            send(client.connection, {"refused": reason})
        self._drop(client)

    def _fork_waiting(self) -> bool:
        """Fork the ranks that were asked for; return True in such a rank."""
        # Memory and ports of a killed rank must be free before its successor begins.
        if any(client.left for client in self._clients.values()):
            return False
        for client in list(self._clients.values()):
            if client.rank is None and client.launched is not None:
                state = client.launched
                if client.differs is not None:
                    self._refuse(client, f"the {client.differs} differs from that of the server")
                elif reason := _unable():
                    self._refuse(client, f"the server cannot fork: {reason}")
                elif self._fork(client, state):
                    return True
        return False

    def _fork(self, client: _Client, state: ProcessState) -> bool:
        server = os.getpid()
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            process = os.fork()
        except OSError as error:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            self._refuse(client, str(error))
            return False
        if process == 0:
            self._become_rank(client, state, server)
            return True
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        client.rank = process
        while client.inbox.descriptors:
            os.close(client.inbox.descriptors.pop())
        self._poll.modify(client.connection, select.POLLRDHUP)
        return False

    def _become_rank(self, client: _Client, state: ProcessState, server: int) -> None:
        """Turn the forked process into a rank, once its task has agreed."""
        try:
            die_with_parent()
            os.setsid()
            if os.getppid() != server:
                os._exit(1)
            self._close(client)
            take_over(state, self._changes, client.inbox.descriptors)
            client.inbox.descriptors.clear()
            _forget_common_names()
            threads, own = self._threads(), self._own
            cpus = len(os.sched_getaffinity(0))
            # OpenBLAS starts no more threads than it has CPUs.
            used = min(int(threads), cpus), min(int(threads), len(own.cpus))
            if threads != own.threads or used[0] != used[1]:
                raise ValueError(
                    f"it gets {threads} threads on {cpus} CPUs, and the server has {own.threads} on "
                    f"{len(own.cpus)}"
                )
            client.connection.setblocking(True)
            send(client.connection, {"rank": os.getpid()})
            client.inbox.wait()
        except BaseException as error:
            with contextlib.suppress(OSError):
                send(client.connection, {"refused": str(error) or repr(error)})
            os._exit(1)
        client.inbox.close()
        STOP.install()
        signal.pthread_sigmask(signal.SIG_SETMASK, state.blocked)

    def _close(self, own: _Client) -> None:
        signal.set_wakeup_fd(-1)
        for end in (self._wake, self._woken):
            os.close(end)
        self._listener.close()
        for client in self._clients.values():
            if client is not own:
                client.inbox.close()

    def _reap(self) -> None:
        """Inform the tasks of ranks that have ended, and kill the helpers of these ranks."""
        while (ended := _ended()) is not None:
            # The helpers are in the group of the rank. The number stays taken until the rank is waited for.
            _kill(ended)
            status = os.waitpid(ended, 0)[1]
            client = next((one for one in self._clients.values() if one.rank == ended), None)
            if client is None:
                continue
            kills = _kills()
            oom = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
            message = {"status": status, "oom": oom and not client.left and kills > self._kills}
            self._kills = kills
            with contextlib.suppress(OSError):
                send(client.connection, message)
            self._drop(client)


def _ended() -> int | None:
    with contextlib.suppress(ChildProcessError):
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return found.si_pid if found else None
    return None


def _kill(rank: int) -> None:
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            kill(rank, signal.SIGKILL)


def _kills() -> int:
    """Return how many processes the kernel has killed for memory, in this process's control group."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if not controllers:
                file = Path(f"/sys/fs/cgroup{group}/memory.events")
            elif "memory" in controllers.split(","):
                file = Path(f"/sys/fs/cgroup/memory{group}/memory.oom_control")
            else:
                continue
            words = file.read_text().split()
            return int(words[words.index("oom_kill") + 1])
    return 0


def _forget_common_names() -> None:
    """Draw again what every process draws at random, and what Python has read from variables and folders."""
    importlib.invalidate_caches()
    random.seed()
    tempfile.tempdir = None
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    if "multiprocessing" in sys.modules:
        import multiprocessing

        multiprocessing.current_process().authkey = os.urandom(32)
