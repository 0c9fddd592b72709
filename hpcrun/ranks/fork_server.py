"""The fork server of a node: ``python -m hpcrun.ranks.fork_server NAME`` starts ranks without slow imports.

A job has one server per node, started with the job. It waits until a rank, started in the usual way, trains
and offers its variables, its command and its CPUs. Then the server becomes a template with the same
(:mod:`hpcrun.ranks.fork_template`), and forks the ranks of the next attempts. Each task that a launcher
starts asks the server first (:mod:`hpcrun.ranks.fork_client`); without an answer it becomes a rank itself.
"""

import argparse
import contextlib
import os
import select
import signal
import socket
import sys
import time
from typing import NoReturn

from hpcrun.descendants import die_with_parent
from hpcrun.ranks.fork_messages import BadMessage, Inbox, is_own, listen, own_address, send
from hpcrun.ranks.fork_template import IGNORED, RankStart, become_template
from hpcrun.ranks.process_state import own_state

_PATIENCE = 5.0


def main() -> NoReturn:
    """Wait for the offer of a rank, then become the template."""
    parser = argparse.ArgumentParser(prog="python -m hpcrun.ranks.fork_server")
    parser.add_argument("name")
    parser.add_argument("--parent", type=int)
    parser.add_argument("--delay", type=float, default=0.0)
    parser.add_argument("--threads")
    parser.add_argument("rank", nargs="*")
    given = parser.parse_args()
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    if given.parent is not None:
        die_with_parent()
        if os.getppid() != given.parent:
            raise SystemExit(f"hpcrun: process {given.parent} has ended")
    where, cpus = own_address(given.name), os.sched_getaffinity(0)
    if given.threads is not None:
        state = own_state()._replace(options=given.rank, arguments=[])
        problem = become_template(RankStart(state, given.threads, state.cpus), where, cpus)
        raise SystemExit(f"hpcrun: no fork server: {problem}")
    try:
        listener = listen(where)
    except OSError as error:
        raise SystemExit(f"hpcrun: no fork server {given.name}: {error}") from error
    while True:
        if (offer := _next_offer(listener)) is not None:
            _refuse_all(listener, given.delay)
            problem = become_template(offer, where, cpus)
            print(f"hpcrun: the fork server waits for another rank: {problem}", file=sys.stderr)


def _refuse_all(listener: socket.socket, seconds: float) -> None:
    late = time.monotonic() + seconds
    while (left := late - time.monotonic()) > 0:
        if select.select([listener], [], [], left)[0]:
            _next_offer(listener)


def _next_offer(listener: socket.socket) -> RankStart | None:
    """Answer one client; return its offer, or None."""
    connection, _ = listener.accept()
    inbox = Inbox(connection)
    try:
        connection.settimeout(_PATIENCE)
        if not is_own(connection):
            return None
        message = inbox.wait()
        if "offer" in message:
            return RankStart.read(message["offer"])
        # Its first rank has not come yet, so this is no news.
        send(connection, {"refused": ""})
    except (OSError, EOFError, BadMessage, TypeError):
        return None
    finally:
        with contextlib.suppress(OSError):
            inbox.close()
    return None


if __name__ == "__main__":
    main()
