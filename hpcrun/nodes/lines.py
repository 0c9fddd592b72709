"""Orders and answers of the helper processes of a job's nodes: JSON objects, one a line; and their srun.

Two programs use them: the agent of a node (``hpcrun.nodes.agent``), over a connection that begins with a key,
and the agent of a check (``hpcrun.network.agent``), over its pipes. docs/decisions/0014-two-node-helpers.md
says why they are two.
"""

import errno
import json
import socket
import threading
from collections.abc import Mapping, Sequence
from typing import Any


def encode(message: Mapping[str, Any]) -> bytes:
    """Return ``message`` as a line."""
    return json.dumps(message).encode() + b"\n"


def decode(line: str | bytes) -> dict[str, Any] | None:
    """Return the message of a line; None for a line that is none, such as a warning of a library."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


class Connection:
    """A socket that carries messages.

    Attributes:
        most: bytes that a line may have; None: any number.
    """

    def __init__(self, link: socket.socket, most: int | None = None) -> None:
        self.link, self.most = link, most
        self._left = b""
        self._sending = threading.Lock()

    def send(self, message: Mapping[str, Any]) -> None:
        """Send one message; raises OSError, also if the other end does not read for some seconds."""
        with self._sending:
            self.link.sendall(encode(message))

    def receive(self) -> list[dict[str, Any]] | None:
        """Return the complete messages that have arrived; None if the other end is closed.

        Raises:
            OSError: the connection is broken, or a line is too long.
        """
        part = self.link.recv(self.most or 1 << 16)
        if not part:
            return None
        *lines, self._left = (self._left + part).split(b"\n")
        if self.most is not None and max(map(len, (*lines, self._left))) > self.most:
            raise OSError(errno.EMSGSIZE, "a line is too long")
        return [message for message in map(decode, lines) if message is not None]


def helpers_command(
    nodes: Sequence[str], name: str, program: Sequence[str], more: Sequence[str] = ()
) -> list[str]:
    """Build the srun of one helper per node, which shares all resources with the ranks' steps.

    Standard input goes to every task, which is srun's default. The loss of a node ends no other helper.

    Args:
        nodes: nodes of this job.
        name: of the step.
        program: the command of a helper.
        more: further options.
    """
    count = str(len(nodes))
    options = ["--nodes", count, "--ntasks", count, "--ntasks-per-node", "1", "--overlap"]
    options += ["--mem=0", "--cpu-bind=none", "--export=ALL", "--nodelist", ",".join(nodes)]
    options += ["--kill-on-bad-exit=0", "--wait=0", "--no-kill", f"--job-name={name}"]
    return ["srun", *options, *more, *program]
