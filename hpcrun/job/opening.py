"""The beginning of an attempt: close the previous attempt, ask the policy, and take ownership."""

import os
import socket
from collections.abc import Sequence
from typing import Any

from hpcrun.diagnose.read_log import scheduler_word
from hpcrun.errors import UserError
from hpcrun.job.finalize import with_lost_announcement, write_result
from hpcrun.job.history import (
    AttemptRecord,
    all_histories,
    asked_to_end,
    finished_before,
    histories,
    jobs_of,
    last_committed,
)
from hpcrun.job.ownership import Occupied, require_free, require_own_number
from hpcrun.job.policy import Budgets, decide
from hpcrun.job.scheduler_view import batch_log
from hpcrun.run.directory import RunDirectory
from hpcrun.run.endings import read_hang
from hpcrun.run.events import Attempt, Cause, Event, read_events, record_event, was_cancelled
from hpcrun.run.files import read_json, read_lines
from hpcrun.run.record import claim


class Refused(UserError):
    """The restart policy allows this run no further attempt."""


def already_finished(run: RunDirectory, attempt: Attempt) -> bool:
    """Return True if an earlier start of this job has finished the run, so that all ranks exit with code 0.

    Each rank checks this before rank 0 opens the attempt; otherwise the other ranks would wait for rank 0.
    """
    if attempt.label == "0" or (read_json(run.result) or {}).get("state") != "finished":
        return False
    return finished_before(read_events(run), attempt)


def open_attempt(run: RunDirectory, attempt: Attempt, budgets: Budgets, **facts: Any) -> None:
    """Make ``attempt`` the run's owner and log that it begins. Called once, by rank 0.

    An earlier attempt without a recorded end lost its node, unless Slurm's messages in its batch log
    give another reason: the attempt itself could not record one.

    Raises:
        Occupied: another job has the run, or this job is cancelled.
        Refused: a budget is used up, and result.json says which; or this attempt was opened before.
        OSError: the run directory cannot be written.
    """
    if facts.get("executor") == "slurm":
        require_free(run, attempt)
        require_own_number(run, attempt)
        _require_new(run, attempt)
    events = with_lost_announcement(run)
    for record in all_histories(events):
        if record.cause is None and record.attempt != attempt:
            cause, reason = _end_of(run, events, record, attempt)
            record_event(
                run,
                "ended",
                attempt=record.attempt,
                cause=cause.value,
                step=record.committed,
                reason=reason,
                last_seen=_last_sign(run, events, record),
                # For another job, a person has requested the next start.
                restart_allowed=record.attempt.job in jobs_of(events, attempt.job),
            )
    # Another job is another submission by a person and starts with fresh budgets.
    chain = jobs_of(events, attempt.job)
    history = [record for record in histories(read_events(run)) if record.attempt.job in chain]
    # After a start that finished, only the result is missing: this start writes it again.
    if history and history[-1].cause not in (None, Cause.FINISHED):
        decision = decide(history, budgets)
        if not decision.restart:
            events = read_events(run)
            record_event(run, "refused", attempt=attempt, reason=decision.reason)
            write_result(run, history[-1].cause, "", decision.reason, last_committed(events))
            raise Refused(f"{run.name}: not started again: {decision.reason}")
    claim(run, attempt)
    if not history:
        # The result of an earlier job: `submit` removes it, sbatch by hand does not.
        run.result.unlink(missing_ok=True)
    cluster = os.environ.get("SLURM_CLUSTER_NAME")
    place: dict[str, Any] = {"cluster": cluster} if cluster else {}
    step = os.environ.get("SLURM_STEP_ID", "")
    if facts.get("executor") == "slurm" and step.isdecimal():
        # For late_kills.py.
        place["slurm_step"] = int(step)
    reported: dict[str, Any] = {"host": socket.gethostname(), **place, **facts}
    record_event(run, "opened", attempt=attempt, **reported)
    others = [one for one in read_events(run) if (one.what, one.attempt) != ("opened", attempt)]
    if attempt.in_place and was_cancelled(others, attempt.job):
        # The cancellation came while the batch step decided. The event above would hide it.
        record_event(run, "cancelled", attempt=attempt)
        raise Occupied(f"{run.name}: job {attempt.job} is cancelled")


def _require_new(run: RunDirectory, attempt: Attempt) -> None:
    """Raise Refused if an earlier srun of the same allocation (salloc) has opened this attempt.

    Files of that step (the rendezvous of the ranks, failures) would be mistaken for files of this step.
    """
    if any((one.what, one.attempt) == ("opened", attempt) for one in read_events(run)):
        raise Refused(
            f"{run.name}: attempt {attempt.owner} has run before in this allocation; start the next attempt "
            f"with SLURM_RESTART_COUNT={attempt.restart + 1} in front of srun, or submit the run"
        )


def _end_of(
    run: RunDirectory, events: Sequence[Event], record: AttemptRecord, successor: Attempt
) -> tuple[Cause, str]:
    mine = [event for event in events if event.attempt == record.attempt]
    if any(event.what == "finished" for event in mine):
        return Cause.FINISHED, "finished"
    word = scheduler_word(batch_log(run, record.attempt))
    words = ["preemption", "time-limit"]
    # A job that Slurm starts again was not cancelled.
    if record.attempt.job != successor.job:
        words.append("cancelled")
        word = "cancelled" if asked_to_end(events, record.attempt) else word
    if word in words:
        return Cause(word), f"{word}; killed before it could record its end"
    hang = read_hang(run.attempt_logs(record.attempt))
    if hang is not None:
        return Cause.HANG, hang.line
    return (
        Cause.NODE_FAILURE,
        "ended without an exit record: its node failed, or all its processes died together",
    )


def _last_sign(run: RunDirectory, events: Sequence[Event], record: AttemptRecord) -> float:
    """Return the last time (Unix seconds) at which an attempt without a recorded end was known to run."""
    reported = [event.time for event in events if event.attempt == record.attempt]
    logged = [
        line["time"]
        for line in read_lines(run.metrics)
        if line.get("restart") == record.attempt.restart and line.get("time", 0.0) >= record.started
    ]
    return float(max([record.started, *reported, *logged]))
