"""Messages between the ranks of a node and its fork server: JSON over a Unix socket, with descriptors.

The socket has an abstract name (unix(7)): no file stays behind, and other nodes cannot mistake it for
theirs. Both sides accept only their own user.
"""

import array
import json
import os
import socket
import struct
import sys
from collections.abc import Sequence
from typing import Any

FORK_SERVER = "HPCRUN_FORK_SERVER"
"""Variable with the name of the job's fork servers; set for ranks of the built-in loop only."""
TEMPLATE = "HPCRUN_FORK_TEMPLATE"
"""Variable of the process that forks ranks."""
STREAMS = 3
"""Standard input, output and error."""
_PEER = struct.Struct("3i")
_LONGEST = 64 << 20


class BadMessage(Exception):
    """The other side is not hpcrun, or of another version."""


def fork_server_command(
    name: str,
    *,
    python: str | None = None,
    parent: int | None = None,
    delay: float = 0.0,
    threads: str | None = None,
    rank: Sequence[str] = (),
) -> list[str]:
    """Return the command that starts the fork server of this node.

    The process must be able to use all CPUs, GPUs and memory of the job on the node, since the ranks run
    under it. It ignores stop signals, and ends with its parent.

    Args:
        name: the value of HPCRUN_FORK_SERVER in the ranks; unique on the node.
        python: the interpreter of the ranks; by default this one.
        parent: the process whose main thread starts the server; the server ends with it.
        delay: seconds from the first offer to the imports: a short job never needs them.
        threads: OMP_NUM_THREADS of the ranks, if the server starts in their environment and is to prepare
            itself without waiting for a rank.
        rank: with ``threads``: the words of a rank's command after Python, such as -u -m hpcrun.worker.
    """
    words = [python or sys.executable, "-m", "hpcrun.ranks.fork_server"]
    if parent is not None:
        words.append(f"--parent={parent}")
    if delay:
        words.append(f"--delay={delay:g}")
    if threads is None:
        return [*words, name]
    return [*words, f"--threads={threads}", name, "--", *rank]


def address(name: str, node: str) -> str:
    """Return the address of the fork server ``name`` on ``node``; one machine may have several nodes."""
    return f"\0hpcrun-fork-{name}-{node}"


def own_address(name: str) -> str:
    """Return the address of the fork server on the node of this task."""
    return address(name, os.environ.get("SLURMD_NODENAME", ""))


def listen(where: str) -> socket.socket:
    """Return a socket that listens at ``where``; raises OSError if another process has the address."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(where)
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    return listener


def connect(where: str, seconds: float) -> socket.socket:
    """Return a connection to the server; its calls wait for at most ``seconds``.

    Raises:
        OSError: no server of this user listens there.
    """
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(seconds)
        connection.connect(where)
        if not is_own(connection):
            raise PermissionError("the fork server belongs to another user")
    except OSError:
        connection.close()
        raise
    return connection


def is_own(connection: socket.socket) -> bool:
    """Return True if the other side belongs to this user."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    user: int = _PEER.unpack(found)[1]
    return user == os.geteuid()


def send(connection: socket.socket, message: Any, descriptors: Sequence[int] = ()) -> None:
    """Send ``message``, a JSON value, with descriptors; raises OSError."""
    data = json.dumps(message).encode() + b"\n"
    if descriptors:
        data = data[socket.send_fds(connection, [data], descriptors) :]
    if data:
        connection.sendall(data)


class Inbox:
    """The messages and descriptors that have arrived on a connection."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._data = b""
        self.descriptors: list[int] = []

    def receive(self) -> Any:
        """Return a message that has arrived; else read once, and return None before the message's end.

        Raises:
            EOFError: the other side has closed the connection.
            BadMessage: this is no message.
            OSError: the connection is broken, or nothing came in time.
        """
        # Two messages may arrive in one read. After the second, the other side may have closed.
        if b"\n" not in self._data:
            self._read()
        line, end, rest = self._data.partition(b"\n")
        if not end:
            if len(self._data) > _LONGEST:
                raise BadMessage("longer than 64 MiB")
            return None
        self._data = rest
        try:
            return json.loads(line)
        except ValueError as error:
            raise BadMessage(str(error)) from error

    def _read(self) -> None:
        space = socket.CMSG_LEN(STREAMS * array.array("i").itemsize)
        data, extra, _, _ = self._connection.recvmsg(1 << 20, space, socket.MSG_CMSG_CLOEXEC)
        for level, kind, content in extra:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                found = array.array("i")
                found.frombytes(content[: len(content) - len(content) % found.itemsize])
                self.descriptors += found
        if not data:
            raise EOFError
        self._data += data

    def wait(self) -> Any:
        """Return the next message; raises as :meth:`receive` does."""
        while (message := self.receive()) is None:
            pass
        return message

    def close(self) -> None:
        """Close the connection, and the descriptors that the caller has not taken."""
        self._connection.close()
        while self.descriptors:
            os.close(self.descriptors.pop())
