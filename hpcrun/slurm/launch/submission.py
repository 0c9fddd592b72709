"""The state of a run that has no job.

Rank 0 of a run that a person started by hand records its process in the run's event log. Nothing restarts
such a run, so its state is that of the process.
"""

import socket
from typing import TYPE_CHECKING

from hpcrun import slurm
from hpcrun.printing import say_aside
from hpcrun.run.directory import RunDirectory
from hpcrun.run.journal.events import Cause, Ended, Opened
from hpcrun.run.journal.journal import Journal, Reader, read_state

if TYPE_CHECKING:
    import psutil


def own_cluster() -> str | None:
    """Return the name of this host's cluster; None: no answer. A line names an old Slurm."""
    shown = slurm.show_config()
    if (version := slurm.parse_old_version(shown)) is not None:
        say_aside(
            f"hpcrun: Slurm {version} is older than {slurm.OLDEST}: restarts and causes of failures may be "
            "wrong; ask your site for a newer Slurm"
        )
    return slurm.parse_cluster_name(shown)


# The clocks of a process's start and of the event log may differ by this many seconds.
_SLACK = 2.0


def process_state(run: RunDirectory, read: Reader = read_state) -> tuple[str, str]:
    """Return ``RUNNING`` or nothing, and a detail, for the attempt that opened ``run`` last."""
    state = read(run)
    opened = state.newest(Opened)
    if opened is None:
        return "", ""
    if _is_elsewhere(opened):
        if any(end.attempt == opened.attempt for end in state.of_kind(Ended)):
            return "", ""
        return "RUNNING", f"on {opened.host}, according to its files"
    return ("RUNNING", "in the terminal that started it") if _process(opened) else ("", "")


def write_off(run: RunDirectory) -> str | None:
    """Record the end of an attempt on another host, which is gone; return that host, or None for this host.

    A process that runs there after all stops writing once another attempt has the run.
    """
    journal = Journal(run)
    opened = journal.read().newest(Opened)
    if opened is None or not _is_elsewhere(opened):
        return None
    host = str(opened.host)
    ended = Ended(
        attempt=opened.attempt,
        cause=Cause.NODE_FAILURE.value,
        reason=f"{host} is gone, as a person says",
        restart_allowed=False,
    )
    journal.append(ended)
    return host


def _is_elsewhere(opened: Opened) -> bool:
    return opened.host != socket.gethostname()


def _process(opened: Opened) -> "psutil.Process | None":
    """Return rank 0's process, or None after its end; a process younger than its event reuses the pid."""
    import psutil

    if opened.pid is None:
        return None
    try:
        process = psutil.Process(opened.pid)
        alive = process.status() != psutil.STATUS_ZOMBIE
        return process if alive and process.create_time() <= opened.time + _SLACK else None
    except (psutil.Error, ValueError):
        return None
