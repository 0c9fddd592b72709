"""The files in the memory of all nodes: those of another node are read over TCP.

A rank serves the files of its node while the ranks copy or restore. A client must know the key of the
job: it answers a random challenge with a keyed hash (HMAC). The bytes are not encrypted, as those of gloo and
NCCL are not. The receiver compares them with the hashes of the checkpoint.
"""

import contextlib
import errno
import hashlib
import hmac
import itertools
import json
import os
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hpcrun.ranks.addresses import listen
from hpcrun.ranks.interfaces import own_interfaces, rendezvous_addresses
from hpcrun.run.memory_keeper import KeeperClient, MemoryFile
from hpcrun.storage.disk import FileSystem
from hpcrun.storage.manifest import MANIFEST, step_name

_CHALLENGE, _DIGEST = 16, hashlib.sha256().digest_size
_HEAD = struct.Struct("!q")
_CONNECT, _ANSWER = 5.0, 120.0
"""Seconds for a connection, and for the next bytes of an answer."""


@dataclass(frozen=True)
class PeerAddress:
    """The address of a rank that serves: names and addresses of its host, best first, and the port."""

    hosts: tuple[str, ...]
    port: int


def host_addresses(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names and addresses of this host for ranks of other nodes, best first."""
    # MASTER_ADDR is the host of rank 0.
    own = {name: value for name, value in environ.items() if name != "MASTER_ADDR"}
    chosen = own_interfaces().get(environ.get("GLOO_SOCKET_IFNAME", ""), [])
    return tuple(dict.fromkeys([*chosen, *rendezvous_addresses(own)]))


@contextmanager
def serving(
    key: str, hosts: Sequence[str], open_file: Callable[[MemoryFile], int]
) -> Iterator[PeerAddress | None]:
    """Serve files to other nodes during the block; yields None if this host cannot.

    Args:
        key: the key of the job.
        hosts: the addresses of this host.
        open_file: returns a descriptor, which the server closes; raises OSError.
    """

    def accept(door: socket.socket) -> None:
        while True:
            try:
                line, _ = door.accept()
            except OSError:  # the end of the block
                return
            threading.Thread(target=serve, args=(line,), daemon=True).start()

    def serve(line: socket.socket) -> None:
        with line, contextlib.suppress(OSError, ValueError):
            line.settimeout(_ANSWER)
            _answer(line, key, open_file)

    with contextlib.ExitStack() as stack:
        address = None
        with contextlib.suppress(Exception):  # the other ranks wait for this rank's report
            door = stack.enter_context(listen([0]))
            threading.Thread(target=accept, args=(door,), daemon=True, name="serve memory").start()
            address = PeerAddress(tuple(hosts), door.getsockname()[1])
        try:
            yield address
        finally:
            # The connections end with their clients.
            with contextlib.suppress(OSError):
                if address is not None:
                    door.shutdown(socket.SHUT_RDWR)


class PeerFile:
    """A file of another node, open for reading. Every method raises OSError; used by one thread at a time."""

    def __init__(self, address: PeerAddress, key: str, file: MemoryFile) -> None:
        self._line = _connect(address, key)
        try:
            raw = json.dumps(file).encode()
            self._line.sendall(_HEAD.pack(len(raw)) + raw)
            self.size = self._number()
        except BaseException:
            self._line.close()
            raise

    def read_into(self, view: memoryview, position: int) -> int:
        """Read from ``position`` into ``view``; return the number of bytes, 0 at the end."""
        self._line.sendall(_HEAD.pack(position) + _HEAD.pack(len(view)))
        count = self._number()
        _fill(self._line, view[:count])
        return count

    def close(self) -> None:
        """Close the connection."""
        self._line.close()

    def _number(self) -> int:
        number = _received_number(self._line)
        if number < 0:
            raise OSError(-number, os.strerror(-number))
        return number


def _connect(address: PeerAddress, key: str) -> socket.socket:
    trouble: OSError = OSError(errno.EHOSTUNREACH, "has no address")
    for host in address.hosts:
        try:
            line = socket.create_connection((host, address.port), _CONNECT)
        except OSError as error:
            trouble = error
            continue
        try:
            line.settimeout(_CONNECT)
            challenge = bytearray(_CHALLENGE)
            _fill(line, memoryview(challenge))
            line.sendall(_digest(key, challenge))
            line.settimeout(_ANSWER)
            return line
        except OSError as error:  # another program's port on a host of the same name
            line.close()
            trouble = error
    # A timeout has no number.
    raise OSError(
        trouble.errno or errno.ETIMEDOUT, f"{', '.join(address.hosts)}: no connection: {trouble}"
    )


def _answer(line: socket.socket, key: str, open_file: Callable[[MemoryFile], int]) -> None:
    """Check the other side, open the file that it names, and send the ranges that it asks for."""
    challenge, answer = secrets.token_bytes(_CHALLENGE), bytearray(_DIGEST)
    line.sendall(challenge)
    _fill(line, memoryview(answer))
    if not hmac.compare_digest(answer, _digest(key, challenge)):
        return
    raw = bytearray(min(_received_number(line), 1 << 16))
    _fill(line, memoryview(raw))
    file = MemoryFile(*json.loads(raw))
    try:
        descriptor = open_file(file)
    except OSError as error:
        line.sendall(_HEAD.pack(-(error.errno or errno.EIO)))
        return
    with os.fdopen(descriptor, "rb", buffering=0) as content:
        line.sendall(_HEAD.pack(size_of(descriptor, file)))
        while True:
            position, length = _received_number(line), _received_number(line)
            # A file that has become shorter ends early, and the receiver sees it.
            count = max(0, min(length, size_of(descriptor, file) - position))
            line.sendall(_HEAD.pack(count))
            # sendfile(2) does not wait on a socket with a timeout.
            if count and line.sendfile(content, position, count) < count:
                return


def size_of(descriptor: int, file: MemoryFile) -> int:
    """Return the size of ``file`` in bytes: its memory is a whole number of pages, unless it was cut."""
    return min(os.fstat(descriptor).st_size, file.size)


def _digest(key: str, challenge: bytes | bytearray) -> bytes:
    return hmac.new(key.encode(), challenge, hashlib.sha256).digest()


def _received_number(line: socket.socket) -> int:
    raw = bytearray(_HEAD.size)
    _fill(line, memoryview(raw))
    number: int = _HEAD.unpack(raw)[0]
    return number


def _fill(line: socket.socket, view: memoryview) -> None:
    """Receive until ``view`` is full; raises ConnectionResetError at the end of the connection."""
    while view:
        count = line.recv_into(view)
        if count == 0:
            raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
        view = view[count:]


class _NodeFile:
    """A file of this node, open for reading."""

    def __init__(self, descriptor: int, file: MemoryFile) -> None:
        self._descriptor, self.size = descriptor, size_of(descriptor, file)

    def read_into(self, view: memoryview, position: int) -> int:
        left = max(0, self.size - position)
        return os.preadv(self._descriptor, [view[:left]], position) if left else 0

    def close(self) -> None:
        os.close(self._descriptor)


@dataclass(frozen=True)
class NodeMemory:
    """The memory of one node, as one of its ranks reports it.

    Attributes:
        keeper: the key of the node's keeper.
        files: the files that the keeper has.
        address: the address of the rank.
    """

    keeper: str
    files: tuple[MemoryFile, ...]
    address: PeerAddress | None


class MemoryFiles(FileSystem):
    """The files in the memory of all nodes, as one file system that the checkpoint store reads.

    It has the newest snapshot of each step. Files of this node come from its keeper, others over TCP.

    Args:
        client: the keeper of this node.
        rank: this rank; it spreads the connections over the ranks of a node.
        everyone: the reports of all ranks.
    """

    def __init__(self, client: KeeperClient, rank: int, everyone: Sequence[NodeMemory]) -> None:
        self._client, self._rank = client, rank
        self.snapshots = _choose(everyone)
        self._places: dict[tuple[str, str], tuple[MemoryFile, list[NodeMemory]]] = {}
        for report in everyone:
            for file in report.files:
                if self.snapshots.get(file.step) == file.snapshot:
                    key = step_name(file.step), file.name
                    self._places.setdefault(key, (file, []))[1].append(report)
        self._numbers = itertools.count()
        self._open: dict[int, _NodeFile | PeerFile] = {}

    def names(self, path: Path) -> list[str]:
        """Return the names of the steps, whatever ``path`` is."""
        return [step_name(step) for step in sorted(self.snapshots)]

    def open(self, path: Path) -> int:
        """Open a file for reading, and return a number for it."""
        file, reports = self._places.get((path.parent.name, path.name), (None, []))
        if file is None:
            raise FileNotFoundError(errno.ENOENT, "not in the memory of a node", str(path))
        addresses = [report.address for report in reports if report.address is not None]
        opened: _NodeFile | PeerFile
        if any(report.keeper == self._client.key for report in reports):
            opened = _NodeFile(self._client.open(file), file)
        elif addresses:
            opened = PeerFile(addresses[self._rank % len(addresses)], self._client.secret, file)
        else:
            raise FileNotFoundError(errno.ENOENT, "no rank serves it", str(path))
        number = next(self._numbers)
        self._open[number] = opened
        return number

    def size(self, descriptor: int) -> int:
        """Return the size of the content in bytes."""
        return self._open[descriptor].size

    def read_into(self, descriptor: int, view: memoryview, position: int) -> int:
        """Read from ``position`` into ``view``; return the number of bytes, 0 at the end."""
        return self._open[descriptor].read_into(view, position)

    def drop_cache(self, descriptor: int) -> None:
        """Do nothing: memory has no cache."""

    def close(self, descriptor: int) -> None:
        """Close the file."""
        self._open.pop(descriptor).close()


def _choose(everyone: Iterable[NodeMemory]) -> dict[int, str]:
    """Return for each step the snapshot with a manifest that has the most files.

    A step has two snapshots if an attempt took it and was killed before the nodes had dropped the older one.
    """
    names: dict[tuple[int, str], set[str]] = {}
    for report in everyone:
        for file in report.files:
            names.setdefault((file.step, file.snapshot), set()).add(file.name)
    found: dict[int, str] = {}
    for (step, snapshot), files in sorted(names.items(), key=lambda each: (len(each[1]), each[0])):
        if MANIFEST in files:
            found[step] = snapshot
    return found
