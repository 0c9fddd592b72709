"""The refusal of a start at step 0 where earlier checkpoints are gone, as after the purge of a scratch disk.

Such a start would throw away, without a word, what the run had trained.
"""

from hpcrun.lifecycle.history import last_committed, of_script
from hpcrun.run.directory import RunDirectory, RunError
from hpcrun.run.events import read_events


def require_none_lost(run: RunDirectory, handle: str | None = None) -> None:
    """Return unless the event log of ``run``, which has no checkpoint, knows of one.

    Args:
        handle: what a person types for the run; None: its name.

    Raises:
        RunError: with the way to start from step 0 all the same.
    """
    events = read_events(run)
    step = last_committed(events)
    # A script saves where it likes, and only reports that it has.
    if step is not None and not of_script(events):
        raise RunError(
            f"{run.checkpoints}: step {step} was saved, and no checkpoint is left; put the folder back, or "
            f"start from step 0 with `hpcrun resume {handle or run.name} --from-scratch`"
        )
