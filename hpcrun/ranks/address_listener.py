"""A listener on rank 0 that shows the other ranks which of its addresses they can reach.

The ranks of a script connect to MASTER_ADDR:MASTER_PORT, where the script of rank 0 starts to listen seconds
later. Until then rank 0 answers on another port, with a key that no other host knows.
"""

import contextlib
import socket
import threading
import time

from hpcrun.run.rendezvous import Rendezvous

_ANSWER = 5.0
_PAUSE = 0.1


def answer(listener: socket.socket, key: str) -> None:
    """Send ``key`` to every client of ``listener`` from a thread, until it is closed or the process ends."""
    threading.Thread(
        target=_answer_all, args=(listener, key.encode()), name="hpcrun-greeting", daemon=True
    ).start()


def leads_to(
    address: str, rendezvous: Rendezvous, patience: float, *, least: float = _ANSWER
) -> bool:
    """Return True if the host of ``address`` answers on the rendezvous port with its key.

    Args:
        patience: seconds to connect.
        least: minimum seconds to wait for the answer of a host that has connected.
    """
    try:
        with socket.create_connection((address, rendezvous.port), timeout=patience) as connection:
            connection.settimeout(max(patience, least))
            heard = b""
            while len(heard) < len(rendezvous.key) and (more := connection.recv(256)):
                heard += more
    except (OSError, UnicodeError):
        return False
    return heard == rendezvous.key.encode()


def _answer_all(listener: socket.socket, key: bytes) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            if listener.fileno() < 0:
                return
            # The client has disconnected already, or no descriptor is free at the moment.
            time.sleep(_PAUSE)
            continue
        with connection, contextlib.suppress(OSError):
            connection.settimeout(_ANSWER)
            connection.sendall(key)
