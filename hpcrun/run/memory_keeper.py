"""Files in memory that outlive the ranks of a job and never outlive the job: a small process keeps them.

Each node has one keeper. Ranks fill files of memfd_create(2), which are tmpfs memory like files in /dev/shm,
but have no path: the kernel frees such a file when the last process that has it open ends. The keeper ends
with the process that started it, so nothing stays on a node, even if SIGKILL ends every process of the job.
A file in /dev/shm would stay until somebody removes it, and a later job could find an old state.

The keeper's socket is an abstract one (unix(7)), which also leaves nothing. Its name is the hash of a random
key of this start of the job. Both sides check the user id of the other side.

``python -m hpcrun.run.memory_keeper N`` serves the listening socket of descriptor N until its standard input
ends. :func:`start` starts it.
"""

import contextlib
import errno
import hashlib
import json
import os
import secrets
import selectors
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

VARIABLE = "HPCRUN_MEMORY_KEEPER"
"""Environment variable of the ranks: the key of the keepers of this start of the job, on all nodes."""

_LIMIT = 1 << 18
_PATIENCE = 5.0
_STALLED = 1.0
_SPARED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class MemoryFile(NamedTuple):
    """A file of a snapshot: training step, name of the snapshot, name and size (bytes) of the file."""

    step: int
    snapshot: str
    name: str
    size: int


def new_key() -> str:
    """Return a new random key, for :data:`VARIABLE`."""
    return secrets.token_hex(16)


def key_here(environ: Mapping[str, str]) -> str:
    """Return the key of the keeper of this rank's node, ``KEY/NODE``; empty without a keeper.

    Several nodes may share a machine.
    """
    key, node = environ.get(VARIABLE, ""), environ.get("SLURMD_NODENAME")
    return f"{key}/{node}" if key and node and "/" not in key else key


def start(key: str) -> "subprocess.Popen[bytes]":
    """Start the keeper of this node; it ends when this process ends or closes the result's ``stdin``.

    The keeper ignores the signals that Slurm sends to all processes of a step, except SIGKILL.

    Raises:
        OSError: the process cannot be started, or a keeper with this key runs here.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
        door.bind(_address(key))
        door.listen(64)
        return subprocess.Popen(
            [sys.executable, "-m", "hpcrun.run.memory_keeper", str(door.fileno())],
            stdin=subprocess.PIPE,
            pass_fds=[door.fileno()],
            start_new_session=True,
        )


def new_file(name: str) -> int:
    """Return a descriptor of a new file in memory; /proc/PID/fd shows ``name``. Raises OSError."""
    return os.memfd_create(f"hpcrun {name}"[:200], os.MFD_CLOEXEC)


@dataclass(frozen=True)
class KeeperClient:
    """The keeper of this node, as a process of the run ``run`` uses it. Every method raises OSError."""

    key: str
    run: str

    @property
    def secret(self) -> str:
        """The part of the key that all nodes share."""
        return self.key.partition("/")[0]

    def put(self, file: MemoryFile, descriptor: int) -> None:
        """Give a file to the keeper; the caller may close its descriptor.

        The keeper drops the files of an earlier snapshot that was neither chosen by :meth:`only` nor belongs
        to this snapshot, so that it holds at most two snapshots of a run.
        """
        self._ask({"do": "put", "file": file}, descriptor)

    def files(self) -> list[MemoryFile]:
        """Return the files that the keeper has."""
        answer, _ = self._ask({"do": "list"})
        return [MemoryFile(*each) for each in answer["files"]]

    def open(self, file: MemoryFile) -> int:
        """Return a descriptor of ``file``."""
        _, descriptor = self._ask({"do": "get", "file": file})
        if descriptor is None:
            raise FileNotFoundError(
                errno.ENOENT, f"{file.name} of step {file.step} is not in memory"
            )
        return descriptor

    def only(self, snapshot: str = "") -> None:
        """Drop all files that do not belong to ``snapshot``; by default all files."""
        self._ask({"do": "only", "snapshot": snapshot})

    def _ask(self, request: dict[str, Any], given: int | None = None) -> tuple[Any, int | None]:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
            line.settimeout(_PATIENCE)
            line.connect(_address(self.key))
            _require_own_user(line)
            message = json.dumps({**request, "run": self.run}).encode()
            socket.send_fds(line, [message], [] if given is None else [given])
            raw, descriptors, _, _ = socket.recv_fds(line, _LIMIT, 1)
        if not raw:
            raise ConnectionResetError("the keeper of the job's memory has ended")
        answer = json.loads(raw)
        if "error" in answer:
            raise OSError(answer["error"])
        return answer, descriptors[0] if descriptors else None


@dataclass
class _Kept:
    """The files of a run, with their descriptors, and the snapshot that :meth:`KeeperClient.only` chose."""

    files: dict[MemoryFile, int] = field(default_factory=dict)
    chosen: str = ""

    def drop_others(self, *snapshots: str) -> None:
        for file in [file for file in self.files if file.snapshot not in snapshots]:
            os.close(self.files.pop(file))

    def put(self, file: MemoryFile, descriptor: int) -> None:
        self.drop_others(file.snapshot, self.chosen)
        before = self.files.pop(file, None)
        if before is not None:
            os.close(before)
        self.files[file] = descriptor


class _Keeper:
    def __init__(self) -> None:
        self._runs: dict[str, _Kept] = {}

    def answer(self, line: socket.socket) -> None:
        """Carry out the one request of a connection."""
        line.settimeout(_STALLED)
        _require_own_user(line)
        raw, descriptors, _, _ = socket.recv_fds(line, _LIMIT, 1)
        try:
            found, given = self._carry_out(json.loads(raw), descriptors)
        except (ValueError, LookupError, TypeError) as error:
            found, given = {"error": f"not a request: {error}"}, None
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        socket.send_fds(line, [json.dumps(found).encode()], [] if given is None else [given])

    def _carry_out(
        self, request: dict[str, Any], descriptors: list[int]
    ) -> tuple[dict[str, Any], int | None]:
        kept = self._runs.setdefault(request["run"], _Kept())
        match request["do"]:
            case "put":
                kept.put(MemoryFile(*request["file"]), os.dup(descriptors[0]))
            case "get":
                return {}, kept.files.get(MemoryFile(*request["file"]))
            case "only":
                kept.chosen = request["snapshot"]
                kept.drop_others(kept.chosen)
        return {"files": list(kept.files)}, None


def _address(key: str) -> str:
    return f"\0hpcrun-{hashlib.sha256(key.encode()).hexdigest()[:32]}"


def _require_own_user(line: socket.socket) -> None:
    """Raise PermissionError unless the process at the other end belongs to this user."""
    raw = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    if struct.unpack("3i", raw)[1] != os.geteuid():
        raise PermissionError("the keeper of the job's memory belongs to another user")


def main(descriptor: int) -> None:
    """Serve the listening socket ``descriptor`` until the standard input ends."""
    for number in _SPARED:
        signal.signal(number, signal.SIG_IGN)
    keeper, door = _Keeper(), socket.socket(fileno=descriptor)
    with selectors.DefaultSelector() as waiting:
        waiting.register(0, selectors.EVENT_READ)
        waiting.register(door, selectors.EVENT_READ)
        while True:
            for ready, _ in waiting.select():
                if ready.fd == 0:
                    return
                line, _ = door.accept()
                # A client that is killed in the middle of a request must not end the keeper.
                with line, contextlib.suppress(OSError):
                    keeper.answer(line)


if __name__ == "__main__":
    main(int(sys.argv[1]))
