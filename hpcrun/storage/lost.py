"""Refuse a start from step 0 of a run that has trained and has lost its checkpoints.

Such a start would discard the training so far without a message.
"""

from hpcrun.run.directory import RunDirectory, RunError
from hpcrun.run.endings import node_name
from hpcrun.run.files import read_lines
from hpcrun.run.journal.events import Started
from hpcrun.run.journal.journal import Journal


def require_none_lost(run: RunDirectory, handle: str | None = None) -> None:
    """Refuse a run without a checkpoint that has trained: a start from step 0 would lose the training.

    The event log names the saved steps. If it is gone too, the metrics show that the run has trained.

    Args:
        handle: the name of the run that a person types; None: the run's own name.

    Raises:
        RunError: the checkpoints are gone; the message says how to start from step 0.
    """
    state = Journal(run).read()
    step = state.committed
    # A script chooses its own files and only reports its saves.
    if state.of_script:
        return
    found = f"step {step} was saved"
    if step is None:
        # A start writes its event before its metrics.
        logged = [line["step"] for line in read_lines(run.metrics) if "step" in line]
        if not logged or state.newest(Started):
            return
        found = f"{run.metrics.name} has step {logged[-1]}, but {run.events.name} has no start"
    name = handle or run.name
    raise RunError(
        f"{run.checkpoints}: {found}, and no checkpoint is left: {node_name()} lists none; if `ls` on "
        "another node shows step folders there, the mount of this node is at fault: "
        f"`hpcrun resume {name}` without this node; else put the folder back, or start a new run with "
        f"`hpcrun submit -c {run.config} --name OTHER`"
    )
