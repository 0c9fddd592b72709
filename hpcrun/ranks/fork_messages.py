"""Messages between the ranks of a node and its fork server: JSON over a Unix socket, with descriptors.

The socket has an abstract name (unix(7)): no file stays behind, and other nodes cannot mistake it for
theirs. Both sides accept only their own user.
"""

import array
import json
import os
import socket
import struct
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
    """Return a connection to the server, whose calls wait for at most ``seconds``.

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
    """What has arrived on a connection."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._data = b""
        self.descriptors: list[int] = []

    def receive(self) -> Any:
        """Read once; return a message, or None before its end.

        Raises:
            EOFError: the other side has closed the connection.
            BadMessage: this is no message.
            OSError: the connection is broken, or nothing came in time.
        """
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

    def wait(self) -> Any:
        """Return the next message; raises as :meth:`receive` does."""
        while (message := self.receive()) is None:
            pass
        return message

    def close(self) -> None:
        """Close the connection, and the descriptors that nobody has taken."""
        self._connection.close()
        while self.descriptors:
            os.close(self.descriptors.pop())
