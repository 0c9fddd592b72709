"""Refusal to start at step 0 if earlier checkpoints are gone, for example after a purge of a scratch disk.

Such a start would discard the training so far without a message.
"""

import contextlib
import os
import time
from pathlib import Path

from hpcrun.checkpoint.storage.steps import committed_steps
from hpcrun.job.history import last_committed, of_script
from hpcrun.run.directory import RunDirectory, RunError
from hpcrun.run.endings import node_name
from hpcrun.run.events import read_events
from hpcrun.run.io.files import read_lines


def require_none_lost(run: RunDirectory, handle: str | None = None, *, pause: float = 2.0) -> bool:
    """Look for a checkpoint of ``run`` again after a first look found none although the run has trained.

    The event log names the saved steps. If it is gone too, the metrics show that the run has trained. The
    first listing may have come from a cache of this node.

    Args:
            handle: the name of the run that a person types; None: the run's own name.
            pause: seconds between the two looks: a failover of a file server, or a rename on another node,
                may take this long to become visible.

    Returns:
            True if there is a checkpoint after all; False if none was ever committed.

    Raises:
            RunError: the checkpoints are gone; the message says how to start from step 0.
        OSError: their folder cannot be listed.
    """
    events = read_events(run)
    step = last_committed(events)
    # A script chooses its own files and only reports its saves.
    if of_script(events):
        return False
    found = f"step {step} was saved"
    if step is None:
        # A start writes its event before its metrics.
        logged = [line["step"] for line in read_lines(run.metrics) if "step" in line]
        if not logged or any(event.what == "started" for event in events):
            return False
        found = f"{run.metrics.name} has step {logged[-1]}, but {run.events.name} has no start"
    time.sleep(pause)
    if steps_listed_anew(run):
        return True
    name = handle or run.name
    raise RunError(
        f"{run.checkpoints}: {found}, and no checkpoint is left: {node_name()} has listed the "
        "folder twice; if `ls` on another node shows step folders there, the mount of this node is at fault: "
        f"`hpcrun resume {name}` without this node; else put the folder back, or start from step 0 with "
        f"`hpcrun resume {name} --from-scratch`"
    )


def steps_listed_anew(run: RunDirectory) -> list[int]:
    """Return the committed steps, newest first, from a listing that bypasses this node's cache.

    Raises:
        OSError: the folder exists but cannot be listed.
    """
    for folder in (run.path, run.checkpoints):
        _drop_listing(folder)
    try:
        with os.scandir(run.checkpoints) as entries:
            return committed_steps(entry.name for entry in entries)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _drop_listing(folder: Path) -> None:
    """Create and remove a file: after its own change, an NFS client asks the server again (nfs(5))."""
    # The cleanup of a save removes files with this prefix.
    probe = folder / f".trash-look-{os.urandom(6).hex()}"
    # A folder without write permission can still be listed.
    with contextlib.suppress(OSError):
        descriptor = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
            probe.unlink()
