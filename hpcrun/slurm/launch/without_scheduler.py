"""A run that a person started without any scheduler: torchrun, mp.spawn, or plain python.

Rank 0 records its process in the run's event log. Nothing restarts such a run, so its state is that of the
process, and the only request is a signal, which rank 0 passes to the other ranks by agreement.
"""

import os
import signal
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hpcrun.errors import LaunchError
from hpcrun.run.directory import RunDirectory
from hpcrun.run.events import Event, read_events
from hpcrun.run.last_lines import Reader

if TYPE_CHECKING:
    import psutil

# The clocks of a process's start and of the event log may differ by this many seconds.
_SLACK = 2.0


def process_state(run: RunDirectory, read: Reader = read_events) -> tuple[str, str]:
    """Return ``RUNNING`` or nothing, and a detail, for the attempt that opened ``run`` last."""
    events = read(run)
    opened = _opened(events)
    if opened is None:
        return "", ""
    host = opened.fields.get("host")
    if host != socket.gethostname():
        ended = any(event.what == "ended" and event.attempt == opened.attempt for event in events)
        return ("", "") if ended else ("RUNNING", f"on {host}, according to its files")
    return ("RUNNING", "started by hand") if _process(opened) else ("", "")


def send(run: RunDirectory, number: signal.Signals) -> None:
    """Send ``number`` to rank 0 of the attempt that opened ``run`` last.

    Raises:
        LaunchError: rank 0 runs on another host, or has ended.
    """
    opened = _opened(read_events(run))
    host = opened.fields.get("host") if opened else None
    if host is not None and host != socket.gethostname():
        raise LaunchError(f"{run.name}: was started by hand on {host}; run the command there")
    process = opened and _process(opened)
    if not process:
        raise LaunchError(f"{run.name}: its rank 0 has ended; nothing was done")
    os.kill(process.pid, number)


def _opened(events: Sequence[Event]) -> Event | None:
    opened = [event for event in events if event.what == "opened"]
    return opened[-1] if opened else None


def _process(opened: Event) -> "psutil.Process | None":
    """Return rank 0's process, or None after its end; a process younger than its event reuses the pid."""
    import psutil

    try:
        process = psutil.Process(int(opened.fields["pid"]))
        alive = process.status() != psutil.STATUS_ZOMBIE
        return process if alive and process.create_time() <= opened.time + _SLACK else None
    except (psutil.Error, KeyError, TypeError, ValueError):
        return None
