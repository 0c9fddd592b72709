"""The opening of a prepared attempt by its rank 0, and the refusals of an attempt.

The supervisor has prepared the attempt: it may begin. Rank 0 then becomes the run's owner.
"""

import os
import socket
from typing import Any

from hpcrun.errors import ErrorOnAllRanks, UserError
from hpcrun.run.attempt import Attempt
from hpcrun.run.directory import RunDirectory
from hpcrun.run.endings import node_name
from hpcrun.run.files import read_json
from hpcrun.run.journal.events import BadInput, CancelRequested, Opened
from hpcrun.run.journal.journal import Journal
from hpcrun.run.journal.state import State
from hpcrun.run.record import claim


class Occupied(UserError):
    """Another job has the run, or this job is cancelled."""


class Refused(UserError):
    """The restart policy allows this run no further attempt, or this attempt was opened before."""


def already_finished(run: RunDirectory, attempt: Attempt) -> bool:
    """Return True if an earlier start of this job has finished the run, so that all ranks exit with code 0.

    Each rank checks this before rank 0 opens the attempt; otherwise the other ranks would wait for rank 0.
    """
    if attempt.label == "0" or (read_json(run.result) or {}).get("state") != "finished":
        return False
    return Journal(run).read().finished_before(attempt)


def require_new(run: RunDirectory, attempt: Attempt, state: State) -> None:
    """Check that no earlier srun of the same allocation (salloc) has opened this attempt.

    Files of that step (the rendezvous of the ranks, failures) would be mistaken for files of this step.

    Raises:
        Refused: an earlier srun has.
    """
    if state.has_opened(attempt):
        raise Refused(
            f"{run.name}: attempt {attempt.owner} has run before in this allocation; start the next attempt "
            f"with SLURM_RESTART_COUNT={attempt.restart + 1} in front of srun, or submit the run"
        )


def become_owner(run: RunDirectory, attempt: Attempt, state: State, **facts: Any) -> State:
    """Make this process the run's owner, for ``attempt``, and log that its ranks run. Called once, by rank 0.

    Args:
        run: the run directory.
        attempt: the attempt, which may begin.
        state: the state of the run.
        facts: the fields of the event.

    Returns:
        The state after the opening.

    Raises:
        Occupied: this job is cancelled.
        Refused: this attempt was opened before.
        OSError: the run directory cannot be written.
    """
    journal = Journal(run)
    if facts.get("executor") == "slurm":
        require_new(run, attempt, state)
    claim(run, attempt)
    cluster = os.environ.get("SLURM_CLUSTER_NAME")
    place: dict[str, Any] = {"cluster": cluster} if cluster else {}
    step = os.environ.get("SLURM_STEP_ID", "")
    if facts.get("executor") == "slurm" and step.isdecimal():
        # For late_kills.py.
        place["slurm_step"] = int(step)
    reported: dict[str, Any] = {"host": socket.gethostname(), **place, **facts}
    opened = Opened(attempt=attempt, **reported)
    journal.append(opened)
    if not attempt.in_place:
        return state.after(opened)
    state = journal.read()
    if state.without_opening(attempt).was_cancelled(attempt.job):
        # The cancellation came while the batch step decided. The event above would hide it.
        journal.append(CancelRequested(attempt=attempt))
        raise Occupied(f"{run.name}: job {attempt.job} is cancelled")
    return state


def note_refusal(run: RunDirectory, attempt: Attempt, error: UserError) -> None:
    """Write the event ``bad-input``, with the facts about nodes that the classification needs."""
    known = error if isinstance(error, ErrorOnAllRanks) else None
    refused = BadInput(
        attempt=attempt,
        reason=str(error),
        kind=type(error).__name__,
        host=(known and known.host) or node_name(),
        certain=error.certain,
    )
    Journal(run).note(refused)
