"""The interface on which every pair of nodes can connect, found by connecting.

A name, a subnet or an active link proves little: nodes have Docker bridges with one and the same address,
management networks, and cards without a cable on some nodes.
"""

import contextlib
import secrets
import socket
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain, islice

Interfaces = Mapping[str, Sequence[str]]
"""The addresses of each interface, as `own_interfaces` returns them."""

PATIENCE = 3.5
"""Seconds for a connection: a lost segment is sent again after one second, and again after three."""
TRIES = 2
_AT_ONCE = 32
_ENOUGH = 8
"""Silent peers after which the rest of an interface is not tried, to limit waits in a split network."""
_BACKLOG = 1024
# NCCL also prefers InfiniBand; hsn is Slingshot.
_FAST = ("ib", "hsn")


@dataclass(frozen=True)
class Listener:
    """The listener of a node: its port on all addresses, its answer word, and its interfaces."""

    port: int
    word: str
    interfaces: Interfaces


@dataclass
class AnswerServer:
    """Answers each connection to this node with a random word, until it is closed."""

    interfaces: Interfaces
    word: str = field(default_factory=lambda: secrets.token_hex(8))

    def __post_init__(self) -> None:
        self._listener = _listener()
        self.door = Listener(self._listener.getsockname()[1], self.word, self.interfaces)
        threading.Thread(target=self._answer, name="hpcrun-door", daemon=True).start()

    def _answer(self) -> None:
        while True:
            try:
                link, _ = self._listener.accept()
            except OSError:
                return
            with link, contextlib.suppress(OSError):
                link.sendall(self.word.encode() + b"\n")

    def close(self) -> None:
        """Stop answering."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def _listener() -> socket.socket:
    if socket.has_dualstack_ipv6():
        # A kernel may support IPv6 but not allow its use.
        with contextlib.suppress(OSError):
            return socket.create_server(
                ("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG
            )
    return socket.create_server(("", 0), backlog=_BACKLOG)


def reached(own: Interfaces, peers: Sequence[Listener]) -> list[str]:
    """Return the interfaces of this node from which all ``peers`` answer on their interface of that name."""
    return [name for name, silent in silent_peers(own, peers).items() if not silent]


def silent_peers(own: Interfaces, peers: Sequence[Listener]) -> dict[str, list[int]]:
    """Return, for each interface that reaches a peer, the numbers of the ``peers`` that do not answer."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        found = {name: _silent(name, own, peers, pool) for name in own}
    return {name: silent for name, silent in found.items() if silent is not None}


def agreed(found: Sequence[Sequence[str]], speeds: Mapping[str, float]) -> str | None:
    """Return the best of the interfaces that all nodes have found, or None.

    Args:
        found: the result of `reached` on each node.
        speeds: of the interfaces of one node. InfiniBand and Slingshot come first, then the fastest.
    """
    common = [name for name in found[0] if all(name in names for names in found)] if found else []
    return min(
        common,
        key=lambda name: (not name.startswith(_FAST), -speeds.get(name, 0.0)),
        default=None,
    )


def link_speeds() -> dict[str, float]:
    """Return the speeds of this node's interfaces in Mbit/s, from the kernel; 0: unknown."""
    import psutil

    return {name: float(state.speed) for name, state in psutil.net_if_stats().items()}


def _silent(
    name: str, own: Interfaces, peers: Sequence[Listener], pool: ThreadPoolExecutor
) -> list[int] | None:
    # Most interfaces that lead nowhere fail here, after one wait. Two peers, because one may be broken.
    first = list(pool.map(lambda peer: _answers(name, own, peer), peers[:2]))
    if first and not any(first):
        return None
    rest = pool.map(lambda peer: _answers(name, own, peer), peers[2:])
    return list(islice((at for at, heard in enumerate(chain(first, rest)) if not heard), _ENOUGH))


def _answers(name: str, own: Interfaces, peer: Listener) -> bool:
    for address in peer.interfaces.get(name, ()):
        source = next((one for one in own[name] if (":" in one) == (":" in address)), None)
        if source is None:
            continue
        for _ in range(TRIES):
            with contextlib.suppress(OSError):
                if _word_at(address, peer.port, source) == peer.word:
                    return True
    return False


def _word_at(address: str, port: int, source: str) -> str:
    with socket.create_connection((address, port), PATIENCE, (source, 0)) as link:
        text = b""
        while not text.endswith(b"\n") and len(text) < 100:
            part = link.recv(100)
            if not part:
                break
            text += part
        return text.decode(errors="replace").strip()
