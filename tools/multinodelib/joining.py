"""The other hosts: each connects to node 0 and waits for the start."""

import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hpcrun.errors import UserError
from hpcrun.run.directory import RunDirectory
from hpcrun.slurm.launch import jobs
from multinodelib.messages import (
    HELLO,
    Asked,
    Closed,
    Line,
    port_words,
    require_agreement,
    words_of,
)

_BANNER = 5.0
_PAUSE = 1.0


def join(
    asked: Asked,
    place: tuple[str, int],
    see: Callable[[str, dict[str, Any]], None],
    patience: float,
) -> bool:
    """Agree with node 0 on the run, and wait for the start; return True if the run is finished.

    Args:
        place: the address and the port of node 0.
        see: waits until this host sees the run with the record of node 0; raises UserError.
        patience: seconds to wait for node 0, and for the other hosts.

    Raises:
        UserError: node 0 does not answer, a host disagrees, or this host does not see the run.
    """
    line = _connect(asked, place, patience)
    try:
        line.send(**words_of(asked))
        answer = line.receive(patience)
        require_agreement(answer)
        if answer["record"] is None:
            line.send(ready=True)
            line.receive(patience)
            return True
        try:
            see(asked.run, answer["record"])
        except UserError as error:
            line.send(refused=f"node {asked.node}: {error}")
            raise
        line.send(ready=True)
        require_agreement(line.receive(patience))
    except Closed as error:
        raise UserError(
            f"node 0 at {port_words(place)} has ended the start: {error}; its terminal shows the reason"
        ) from error
    finally:
        line.close()
    return False


def _connect(asked: Asked, place: tuple[str, int], patience: float) -> Line:
    """Return a connection to node 0, which may start later; raises UserError."""
    late, reported = time.monotonic() + patience, False
    while True:
        try:
            connection = socket.create_connection(place, _BANNER)
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or str(error)
        else:
            line = Line(connection)
            try:
                if line.receive(_BANNER).get("hello") == HELLO:
                    return line
            except Closed:
                pass
            line.close()
            if jobs.state(RunDirectory(Path(asked.run))).live:
                raise UserError(
                    f"{asked.run}: is running already, with node 0 at {port_words(place)}; wait for its end, "
                    "or end it with Ctrl-C on one of its hosts"
                )
            reason = "another program answers"
        if time.monotonic() > late:
            raise UserError(
                f"no node 0 at {port_words(place)} within {patience:.0f} s ({reason}); start it there, check "
                "--master_addr and --master_port, and open the port in its firewall"
            )
        if not reported:
            print(
                f"hpcrun: node {asked.node} waits for node 0 at {port_words(place)} ({reason})",
                flush=True,
            )
            reported = True
        time.sleep(_PAUSE)
