"""The start server of the tests: forks Python programs from a process that has imported torch.

A test of whole runs starts dozens of ranks, and each rank imports torch for seconds of processor time. So
``tests/support/at_start/sitecustomize.py``, which Python runs at each start, asks this server first. The
server forks a process with the variables, folder, user, network and streams of the program, and this fork
runs the program. The first process stays: it has the number and the exit code that a launcher knows.

A program runs in its own process:

- with an empty ``HPCRUN_TEST_START`` before pytest, and in tests with the fixture ``fresh_processes``;
- if it starts ranks itself, see ``kind_of`` there;
- if it differs from the server in its interpreter, in a variable that libraries read at import, or in the
  place from which it imports a module of the server.
"""

import contextlib
import ctypes
import gc
import importlib
import io
import multiprocessing.process
import os
import random
import re
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcrun.ranks.fork_messages import BadMessage, Inbox, send
from hpcrun.ranks.process_state import ProcessState, own_state, read_state, take_over

ROOT = Path(__file__).resolve().parents[2]
HOOK = Path(__file__).resolve().parent / "at_start"
VARIABLE = "HPCRUN_TEST_START"
COMMANDS = "HPCRUN_TEST_COMMANDS"
"""Variable of a command of hpcrun that the server may run."""

_PEER_SIZE = 12
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)
# Libraries read these at import.
_READ_AT_IMPORT = re.compile(
    r"(TORCH|PYTORCH|OMP|MKL|KMP|GOMP|NUMEXPR|LD|MALLOC|KINETO|ATEN)_\w+"
    r"|PYTHON(HASHSEED|WARNINGS|OPTIMIZE|DEVMODE|MALLOC)"
)
_READ_LATER = re.compile(r"TORCHELASTIC_\w+|TORCH_NCCL_\w+|TORCH_DISTRIBUTED_\w+")
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_SPACES = ("net", "mnt", "uts", "ipc")
_FIXED_SPACES = ("user", "pid")


class StartServer:
    """The server as two children of this process: for programs with torch, and for commands of hpcrun.

    ``variables`` make Python programs use it.
    """

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="hpcrun-tests-start-"))
        self._folder.chmod(0o755)
        self._processes = [self._start(kind) for kind in _IMPORTS]
        self.variables = {VARIABLE: str(self._folder)}

    def _start(self, kind: str) -> "subprocess.Popen[bytes]":
        address = self._folder / kind
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(address))
            address.chmod(0o777)
            listener.listen(1024)
            return subprocess.Popen(
                [
                    sys.executable,
                    "-u",
                    "-m",
                    "tests.support.start_server",
                    str(listener.fileno()),
                    kind,
                ],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdin=subprocess.DEVNULL,
                pass_fds=[listener.fileno()],
                start_new_session=True,
            )

    def close(self) -> None:
        """End the server and its forks."""
        for process in self._processes:
            process.kill()
            process.wait()
        shutil.rmtree(self._folder)


def prepared(environ: Mapping[str, str]) -> dict[str, str]:
    """Return ``environ`` with the variables by which Python programs find the server of the tests."""
    if not os.environ.get(VARIABLE):
        return {**environ}
    path = [str(HOOK), environ.get("PYTHONPATH", "")]
    found = {"PYTHONPATH": os.pathsep.join(filter(None, path)), VARIABLE: os.environ[VARIABLE]}
    return {**environ, **found}


@dataclass(eq=False)
class _Client:
    """A program that waits for its fork."""

    connection: socket.socket
    inbox: Inbox
    process: int | None = None


class _Server:
    def __init__(self, listener: socket.socket, kind: str) -> None:
        self._listener, self._kind = listener, kind
        self._own, self._ready = own_state(), False
        # Without the folder of this program and PYTHONPATH.
        self._path = [entry for entry in sys.path if entry and Path(entry) != ROOT]
        self._names: set[str] = set()
        self._clients: dict[int, _Client] = {}
        self._poll = select.poll()
        self._wake, self._woken = os.pipe()
        for end in (self._wake, self._woken):
            os.set_blocking(end, False)

    def serve(self) -> ProcessState:
        """Fork until this process is killed; return the state of the program in a fork."""
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
                    connection, _ = self._listener.accept()
                    client = _Client(connection, Inbox(connection))
                    self._clients[connection.fileno()] = client
                    self._poll.register(connection, select.POLLIN)
                elif client := self._clients.get(descriptor):
                    state = self._answer(client)
                    if state is not None:
                        return state

    def _answer(self, client: _Client) -> ProcessState | None:
        """Read from a client; return its state in its fork."""
        if client.process is not None:
            # The program has ended before its fork.
            _kill(client.process)
            self._poll.unregister(client.connection)
            return None
        try:
            message = client.inbox.receive()
            if message is None:
                return None
            state = read_state(message)
            self._import()
            peer = _peer(client.connection)
            problem = self._problem(state, peer[0])
            if problem is not None:
                raise ValueError(problem)
        except (OSError, EOFError, ValueError, BadMessage) as error:
            with contextlib.suppress(OSError):
                send(client.connection, {"refused": str(error)})
            self._drop(client)
            return None
        server = os.getpid()
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        process = os.fork()
        if process == 0:
            self._become(client, state, peer, server)
            return state
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        client.process = process
        while client.inbox.descriptors:
            os.close(client.inbox.descriptors.pop())
        self._poll.modify(client.connection, select.POLLRDHUP)
        return None

    def _import(self) -> None:
        """Import at the first request, so that other tests do not pay for it."""
        if self._ready:
            return
        self._ready = True
        _IMPORTS[self._kind]()
        self._names = {name.partition(".")[0] for name in sys.modules} - {
            "__main__",
            "sitecustomize",
        }
        gc.collect()
        gc.freeze()

    def _problem(self, state: ProcessState, peer: int) -> str | None:
        """Return why a fork of this process cannot run a program with this state; None if it can."""
        if state.python != self._own.python:
            return "another interpreter"
        own, other = _early(self._own.environ), _early(state.environ)
        for name in sorted(own.keys() | other.keys()):
            if own.get(name) != other.get(name):
                return f"the variable {name}"
        for entry in {*_first(state), *_given(state)}:
            if Path(entry).resolve() != ROOT:
                with contextlib.suppress(OSError):
                    found = {path.name.partition(".")[0] for path in Path(entry).iterdir()}
                    if shadowed := found & self._names:
                        return f"{min(shadowed)} in {entry}"
        for space in _FIXED_SPACES:
            if not _same(peer, f"ns/{space}"):
                return f"the {space} namespace"
        if os.geteuid() != 0 and not all(_same(peer, f"ns/{space}") for space in _SPACES):
            return "namespaces"
        if len([*Path("/proc/self/task").iterdir()]) > 1:
            return "threads"
        return None

    def _become(
        self, client: _Client, state: ProcessState, peer: tuple[int, int, int], server: int
    ) -> None:
        """Turn this fork into the program."""
        try:
            os.setsid()
            signal.set_wakeup_fd(-1)
            _enter(peer[0])
            _change_user(*peer)
            _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != server:
                os._exit(1)
            state.environ.pop(COMMANDS, None)
            take_over(state, {}, client.inbox.descriptors)
            client.inbox.descriptors.clear()
            _open_streams(state)
            sys.path[:] = [*_first(state), *_given(state), *self._path]
            importlib.invalidate_caches()
            random.seed()
            if numpy := sys.modules.get("numpy"):
                numpy.random.seed()
            tempfile.tempdir = None
            multiprocessing.current_process().authkey = os.urandom(32)
            multiprocessing.process.ORIGINAL_DIR = state.folder
            send(client.connection, {"process": os.getpid()})
        except BaseException as error:
            with contextlib.suppress(OSError):
                send(client.connection, {"refused": repr(error)})
            os._exit(1)
        for end in (self._wake, self._woken):
            os.close(end)
        self._listener.close()
        for one in self._clients.values():
            one.inbox.close()
        signal.pthread_sigmask(signal.SIG_SETMASK, state.blocked)

    def _reap(self) -> None:
        """Tell each program the end of its fork."""
        with contextlib.suppress(ChildProcessError):
            while (process := os.waitpid(-1, os.WNOHANG))[0]:
                client = next((c for c in self._clients.values() if c.process == process[0]), None)
                if client is not None:
                    # A launcher ends all processes of a step with the rank.
                    if self._kind == "torch":
                        _kill(process[0])
                    with contextlib.suppress(OSError):
                        send(client.connection, {"status": process[1]})
                    self._drop(client)

    def _drop(self, client: _Client) -> None:
        self._clients.pop(client.connection.fileno(), None)
        with contextlib.suppress(KeyError):
            self._poll.unregister(client.connection)
        client.inbox.close()


def _early(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that libraries read at import."""
    found = {
        name: text
        for name, text in environ.items()
        if _READ_AT_IMPORT.fullmatch(name) and not _READ_LATER.fullmatch(name)
    }
    # The first also counts for the libraries of the others.
    threads = environ.get(_THREADS[0], "")
    return found | {name: environ.get(name) or threads for name in _THREADS}


def _kill(process: int) -> None:
    """Kill the fork and the processes that it has started in its group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)


def _peer(connection: socket.socket) -> tuple[int, int, int]:
    """Return the process, user and group of the other side."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_SIZE)
    numbers = [int.from_bytes(raw[at : at + 4], sys.byteorder) for at in range(0, _PEER_SIZE, 4)]
    return numbers[0], numbers[1], numbers[2]


def _same(peer: int, name: str) -> bool:
    return Path(f"/proc/{peer}/{name}").readlink() == Path(f"/proc/self/{name}").readlink()


def _enter(peer: int) -> None:
    """Enter the network and the mounts of another process."""
    spaces = [space for space in _SPACES if not _same(peer, f"ns/{space}")]
    opened = [os.open(f"/proc/{peer}/ns/{space}", os.O_RDONLY) for space in spaces]
    for descriptor in opened:
        if _LIBC.setns(descriptor, 0) != 0:
            raise OSError(ctypes.get_errno(), "setns")
        os.close(descriptor)


def _change_user(peer: int, user: int, group: int) -> None:
    """Become the user of another process."""
    if user == os.geteuid():
        return
    status = Path(f"/proc/{peer}/status").read_text()
    groups = re.search(r"^Groups:(.*)$", status, re.MULTILINE)
    os.setgroups([int(number) for number in groups[1].split()] if groups else [])
    os.setresgid(group, group, group)
    os.setresuid(user, user, user)


def _open_streams(state: ProcessState) -> None:
    """Open the streams as Python does at its start: a wrapper remembers if its file can seek."""
    unbuffered = "-u" in state.options or bool(state.environ.get("PYTHONUNBUFFERED"))
    written = [io.FileIO(number, "w", closefd=False) for number in (1, 2)]
    output = written[0] if unbuffered else io.BufferedWriter(written[0])
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)))
    sys.stdout = io.TextIOWrapper(
        output,  # type: ignore[arg-type]
        line_buffering=written[0].isatty(),
        write_through=unbuffered,
    )
    sys.stderr = io.TextIOWrapper(
        io.BufferedWriter(written[1]), errors="backslashreplace", line_buffering=True
    )


def _given(state: ProcessState) -> list[str]:
    given = state.environ.get("PYTHONPATH", "").split(os.pathsep)
    return [str(Path(state.folder, entry)) for entry in given if entry]


def _first(state: ProcessState) -> list[str]:
    """Return the folder that Python puts first on the import path."""
    if state.environ.get("PYTHONSAFEPATH"):
        return []
    if "-m" in state.options:
        return [state.folder]
    return [str(Path(state.folder, state.options[-1]).resolve().parent)]


def _run(state: ProcessState) -> Any:
    """Run the program, in place of this one."""
    if "-m" in state.options:
        module = state.options[state.options.index("-m") + 1]
        sys.modules.pop(module, None)
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(state.options[-1], run_name="__main__")


def _import_torch() -> None:
    import torch._dynamo
    import torch.distributed  # noqa: F401

    from hpcrun.worker import import_all

    import_all()


def _import_commands() -> None:
    import hpcrun.cli.commands.batch
    import hpcrun.cli.commands.finalize
    import hpcrun.cli.commands.status
    import hpcrun.cli.commands.submit  # noqa: F401

    assert "torch" not in sys.modules


_IMPORTS = {"torch": _import_torch, "commands": _import_commands}


def main() -> None:
    """Serve until the parent ends."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    listener = socket.socket(fileno=int(sys.argv[1]))
    _run(_Server(listener, sys.argv[2]).serve())


if __name__ == "__main__":
    main()
