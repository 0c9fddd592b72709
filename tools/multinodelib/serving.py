"""Node 0: waits for the other hosts, compares what they were asked, makes the run and starts all hosts."""

import contextlib
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hpcrun.errors import ClusterError, UserError
from hpcrun.ranks.addresses import listen
from hpcrun.run.directory import RunDirectory
from hpcrun.slurm.launch import jobs
from multinodelib.messages import (
    HELLO,
    Asked,
    Closed,
    Line,
    asked_of,
    port_words,
    require_agreement,
)

_ENDING = 30.0
"""Seconds for the store of an earlier start to leave the port."""

_ANSWER = 10.0
_SEEN = 180.0


def serve(
    asked: Asked,
    place: tuple[str, int],
    carry_out: Callable[[], dict[str, Any] | None],
    patience: float,
) -> bool:
    """Wait for the other hosts, make the run, and tell them to start; return True if the run is finished.

    Args:
        place: the address of this host for the others, and its port.
        carry_out: makes the run and returns its record; None: the run is finished.
        patience: seconds to wait for the other hosts.

    Raises:
        UserError: the hosts disagree, a host is missing, or the run cannot be made. The others get the line.
    """
    with _listening(asked, place[1], carry_out) as listener:
        meeting = _Meeting(asked, place, listener)
        try:
            meeting.wait(patience)
            record = carry_out()
            meeting.check_folders(record)
        except BaseException as error:
            meeting.refuse(error)
            raise
    # torchrun binds the port next, and the others connect to it after this message.
    meeting.start()
    return record is None


@contextlib.contextmanager
def _listening(
    asked: Asked, port: int, carry_out: Callable[[], dict[str, Any] | None]
) -> Iterator[socket.socket]:
    """Listen on the port; raises UserError if another program has the port."""
    late = time.monotonic() + _ENDING
    while True:
        try:
            listener = listen([port])
            break
        except ClusterError:
            if jobs.state(RunDirectory(Path(asked.run))).live:
                # Refuses the run, because the run is live.
                carry_out()
            if time.monotonic() > late:
                raise UserError(
                    f"port {port} of this host is taken by another program (`ss -ltnp` shows it); choose "
                    "another --master_port on all hosts"
                ) from None
        time.sleep(0.5)
    with listener:
        yield listener


class _Meeting:
    """The hosts that have connected so far, by node."""

    def __init__(self, asked: Asked, place: tuple[str, int], listener: socket.socket) -> None:
        self._asked, self._place, self._listener = asked, place, listener
        self._hosts: dict[int, Line] = {}
        self._token = secrets.token_hex(16)
        self._other: str | None = None

    def wait(self, patience: float) -> None:
        """Wait until all other hosts have connected and agree; raises UserError."""
        nodes, late = self._asked.nodes, time.monotonic() + patience
        print(
            f"hpcrun: node 0 of {nodes} waits for the others at {port_words(self._place)}",
            flush=True,
        )
        over = threading.Event()
        threading.Thread(target=self._check_address, args=(over,), daemon=True).start()
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._listener, selectors.EVENT_READ)
                while len(self._hosts) < nodes - 1:
                    for key, _ in selector.select(0.5):
                        if key.fileobj is self._listener:
                            self._accept(selector)
                        else:
                            selector.unregister(key.fileobj)
                            self._leave(key.data)
                    if self._other is not None:
                        raise UserError(self._other)
                    if time.monotonic() > late:
                        missing = [node for node in range(1, nodes) if node not in self._hosts]
                        raise UserError(
                            f"node {', '.join(map(str, missing))} did not connect to "
                            f"{port_words(self._place)} within {patience:.0f} s; start this command there "
                            "too, and open the port in the firewall"
                        )
        finally:
            over.set()

    def _accept(self, selector: selectors.BaseSelector) -> None:
        connection, _ = self._listener.accept()
        try:
            line = Line(connection)
            line.send(hello=HELLO, token=self._token)
            other = asked_of(line.receive(_ANSWER))
        except (Closed, OSError):
            # This host itself (see below), or a program that examines ports.
            connection.close()
            return
        problem = self._asked.difference(other)
        if problem is not None:
            self._hosts.setdefault(-1, line)
            raise UserError(f"{problem} ({line.address}); start all hosts with the same command")
        if other.node in self._hosts:
            first = self._hosts[other.node].address
            words = f"--node_rank {other.node} is taken by {first}; give each host its own number"
            with contextlib.suppress(Closed):
                line.send(refused=words)
            line.close()
            print(f"hpcrun: {line.address} is refused: {words}", flush=True)
            return
        self._hosts[other.node] = line
        selector.register(connection, selectors.EVENT_READ, other.node)
        print(f"hpcrun: node {other.node} is {line.address}", flush=True)

    def _leave(self, node: int) -> None:
        line = self._hosts.pop(node)
        line.close()
        print(f"hpcrun: node {node} ({line.address}) has left; it may start again", flush=True)

    def _check_address(self, over: threading.Event) -> None:
        """Connect to this host by the address of the others: another host with number 0 may be there."""
        reported = False
        while not over.is_set():
            try:
                connection = socket.create_connection(self._place, _ANSWER)
                with connection:
                    found = Line(connection).receive(_ANSWER)
                if found.get("hello") == HELLO and found.get("token") != self._token:
                    self._other = (
                        f"--node_rank 0 is taken by {port_words(self._place)}, which is another host; give "
                        "each host its own number, or correct --master_addr"
                    )
                return
            except (OSError, Closed) as error:
                if not reported and not over.is_set():
                    print(
                        f"hpcrun: this host does not reach itself at {port_words(self._place)} ({error}); "
                        "--master_addr has to be an address of node 0",
                        flush=True,
                    )
                reported = True
            over.wait(2.0)

    def check_folders(self, record: dict[str, Any] | None) -> None:
        """Wait until all hosts see the run directory; raises UserError."""
        for line in self._hosts.values():
            line.send(record=record)
        for node, line in self._hosts.items():
            try:
                require_agreement(line.receive(_SEEN))
            except Closed as error:
                raise UserError(
                    f"node {node} ({line.address}) has left: {error}; start all hosts again"
                ) from error

    def refuse(self, error: BaseException) -> None:
        """Send the reason of the end to all hosts that wait."""
        words = str(error) if isinstance(error, UserError) else "node 0 was interrupted"
        for line in self._hosts.values():
            with contextlib.suppress(Closed):
                line.send(refused=words)
            line.close()

    def start(self) -> None:
        """Send the start to all hosts."""
        for node, line in self._hosts.items():
            try:
                line.send(start=True)
            except Closed:
                print(f"hpcrun: node {node} ({line.address}) has left", flush=True)
            line.close()
