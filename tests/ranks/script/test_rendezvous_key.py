"""Rank 0 of a script answers with its key, and no other process does."""

from __future__ import annotations

import errno
import socket

from hpcrun.ranks.script.run import answer, leads_to
from hpcrun.run.rendezvous import Rendezvous


def rendezvous_at(listener: socket.socket) -> Rendezvous:
    return Rendezvous(("a",), listener.getsockname()[1], script_port=1)


def test_the_key_is_answered_to_everybody_who_asks() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        rendezvous = rendezvous_at(listener)
        answer(listener, rendezvous.key)
        assert all(leads_to("127.0.0.1", rendezvous, 10.0) for _ in range(5))
        assert not leads_to("no-such-host.invalid", rendezvous, 1.0)
        # The same port of the same host, from another start.
        other = Rendezvous(("a",), rendezvous.port)
        assert not leads_to("127.0.0.1", other, 10.0)


def test_a_port_where_nothing_answers_leads_nowhere() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        rendezvous = rendezvous_at(silent)
        assert not leads_to("127.0.0.1", rendezvous, 0.2, least=0.2)
    assert not leads_to("127.0.0.1", rendezvous, 1.0)


def test_a_failed_accept_does_not_end_the_answers() -> None:
    """Thousands of ranks that connect at the same time can take all descriptors for a moment."""

    class Scarce(socket.socket):
        left = 2

        def accept(self) -> tuple[socket.socket, object]:
            if self.left:
                self.left -= 1
                raise OSError(errno.EMFILE, "Too many open files")
            return super().accept()

    with Scarce() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        rendezvous = rendezvous_at(listener)
        answer(listener, rendezvous.key)
        assert leads_to("127.0.0.1", rendezvous, 10.0)
