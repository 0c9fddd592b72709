"""The task that a launcher has started, when a fork of the node's server trains in its place.

The task passes signals on and ends as the rank does. If it ends first, also by SIGKILL, its connection
closes and the server kills the rank. If the server ends first, the kernel kills the rank, and the task ends
by SIGKILL.
Standard library without slow modules.
"""

import contextlib
import os
import resource
import select
import signal
import sys
import time
from typing import Any, NoReturn

from hpcrun.ranks.fork_messages import (
    FORK_SERVER,
    STREAMS,
    BadMessage,
    Inbox,
    connect,
    own_address,
    send,
)
from hpcrun.ranks.process_state import ProcessState, own_state

_PATIENCE = 60.0
"""Seconds until the server has answered: it waits until the ranks of an earlier attempt have ended."""
_GONE = 30.0
"""Seconds that a killed rank has to end: a GPU's memory takes a while."""
# srun starts a task without a terminal, so SIGTSTP does not come.
_FORWARDED = (
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGCONT,
)


_state: ProcessState | None = None


def become_forked() -> None:
    """Let a fork train in place of this process and exit as the fork does; return if that is impossible.

    Nothing happens without HPCRUN_FORK_SERVER, and under torchrun. Call it in the main thread, after
    ``STOP.install()``: a signal that arrives in between reaches the fork.
    """
    global _state
    name = os.environ.get(FORK_SERVER)
    if not name or "TORCHELASTIC_RUN_ID" in os.environ:
        return
    try:
        _state = own_state()
        connection = connect(own_address(name), _PATIENCE)
    except OSError:
        return
    inbox, (readable, writable) = Inbox(connection), os.pipe()
    os.set_blocking(writable, False)
    before = signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
    try:
        send(connection, {"fork": _state}, range(STREAMS))
        answer = inbox.wait()
        if "rank" in answer:
            # Before the rank runs: Python's own handler of SIGINT would end this task, and so the rank.
            old = {number: signal.getsignal(number) for number in _FORWARDED}
            for number in set(_FORWARDED) - set(_state.ignored):
                signal.signal(number, lambda *_: None)
            try:
                send(connection, {"go": True})
            except OSError:
                for number, handler in old.items():
                    signal.signal(number, handler)
                raise
            connection.settimeout(None)
            _follow(inbox, connection.fileno(), int(answer["rank"]), readable)
        if answer["refused"]:
            _say(f"this rank starts without the fork server: {answer['refused']}")
    except TimeoutError:
        # A rank beside a rank of an earlier attempt would share its GPU.
        _say("ranks of an earlier attempt on this node do not end")
        os._exit(1)
    except (EOFError, OSError, BadMessage) as error:
        _say(f"this rank starts without the fork server: {error or 'the server has ended'}")
    signal.set_wakeup_fd(before)
    inbox.close()
    os.close(readable)
    os.close(writable)


def offer_own_state(threads: str | None) -> None:
    """Offer the state in which this task was started to the server, for ranks of the next attempt.

    Nothing happens in a forked rank.

    Args:
        threads: OMP_NUM_THREADS of the rank.
    """
    if _state is None or threads is None:
        return
    cpus = sorted(os.sched_getaffinity(0))
    with contextlib.suppress(OSError):
        connection = connect(own_address(_state.environ[FORK_SERVER]), 1.0)
        with connection:
            send(connection, {"offer": {"state": _state, "threads": threads, "cpus": cpus}})


def _follow(inbox: Inbox, connection: int, rank: int, signals: int) -> NoReturn:
    """Pass signals on to the rank, and end as the rank ends.

    Args:
        connection, signals: descriptors of the connection, and of the pipe with the numbers of signals.
        rank: number of its process.
    """
    waiting = select.poll()
    waiting.register(connection, select.POLLIN)
    waiting.register(signals, select.POLLIN)
    message: Any = None
    try:
        while message is None:
            for descriptor, _ in waiting.poll():
                if descriptor == connection:
                    message = inbox.receive()
                    continue
                for received in os.read(signals, 4096):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(rank, received)
        status = int(message["status"])
    except (EOFError, OSError, BadMessage):
        _say(f"the fork server of this node has ended, and this rank (process {rank}) with it")
        _kill(rank)
        end_as(signal.SIGKILL)
    if message.get("oom"):
        _say("Memory cgroup out of memory: the kernel has killed this rank")
    end_as(status)


def _kill(rank: int) -> None:
    late = time.monotonic() + _GONE
    with contextlib.suppress(ProcessLookupError):
        os.killpg(rank, signal.SIGKILL)
        while time.monotonic() < late and _runs(rank):
            time.sleep(0.01)


def _runs(process: int) -> bool:
    """Return True unless the process has ended, also before its parent has waited for it."""
    try:
        with open(f"/proc/{process}/stat", encoding="ascii", errors="replace") as stream:  # noqa: PTH123
            return stream.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def end_as(status: int) -> NoReturn:
    """Exit with the code, or by the signal, of a status of waitpid(2)."""
    sys.stdout.flush()
    sys.stderr.flush()
    if not os.WIFSIGNALED(status):
        os._exit(os.WEXITSTATUS(status))
    number = os.WTERMSIG(status)
    # The rank has written its core file, if it may.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
    os.kill(os.getpid(), number)
    os._exit(128 + number)


def _say(line: str) -> None:
    print(f"hpcrun: {line}", file=sys.stderr, flush=True)
