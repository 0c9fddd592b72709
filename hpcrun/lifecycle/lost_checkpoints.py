"""The refusal of a start at step 0 where earlier checkpoints are gone, as after the purge of a scratch disk.

Such a start would throw away, without a word, what the run had trained.
"""

import time

from hpcrun.lifecycle.history import last_committed, of_script
from hpcrun.run.commits import steps_listed_anew
from hpcrun.run.directory import RunDirectory, RunError
from hpcrun.run.endings import node_name
from hpcrun.run.events import read_events

# Seconds. A file server that fails over, or another node's rename, may take as long.
_PAUSE = 2.0


def require_none_lost(run: RunDirectory, handle: str | None = None) -> bool:
    """Look for a checkpoint of ``run`` again, where a first look found none and the event log knows of one.

    The first listing may have come from a cache of this node.

    Args:
        handle: what a person types for the run; None: its name.

    Returns:
        True where there is a checkpoint after all; False where none was ever committed.

    Raises:
        RunError: the checkpoints are gone; with the way to start from step 0 all the same.
        OSError: their folder cannot be listed.
    """
    events = read_events(run)
    step = last_committed(events)
    # A script saves where it likes, and only reports that it has.
    if step is None or of_script(events):
        return False
    time.sleep(_PAUSE)
    if steps_listed_anew(run):
        return True
    name = handle or run.name
    raise RunError(
        f"{run.checkpoints}: step {step} was saved, and no checkpoint is left: {node_name()} has listed the "
        "folder twice; if `ls` on another node shows step folders there, the mount of this node is at fault: "
        f"`hpcrun resume {name}` without this node; else put the folder back, or start from step 0 with "
        f"`hpcrun resume {name} --from-scratch`"
    )
