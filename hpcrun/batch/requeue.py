"""The only module that asks Slurm to start a job again.

Measured with Slurm 22.05, because no manual says it: a job that is preempted without a grace time is
requeued by Slurm, and counts one restart more while its processes still end. ``scontrol requeue`` succeeds
for a job that has ended, and kills one that has been started again. It succeeds for a job that is being
cancelled too: the job then waits for its next start. Only the step daemon's message about the first of the
two requests shows that there was a cancellation.

A job that ends by itself in the grace time of its preemption counts as failed up to Slurm 23.11; from 24.05
on Slurm requeues it (see ``preempting``).
"""

from collections.abc import Callable
from typing import Literal

from hpcrun.batch.preempting import slurm_requeues
from hpcrun.batch.retries import Clock, Retries
from hpcrun.cluster import slurm
from hpcrun.lifecycle.end.scheduler_view import (
    JobView,
    cancelled_now,
    only_log_has_reason,
    query_job,
    wait_for_word,
    word_of,
)
from hpcrun.run.events import Attempt

# Seconds. The step daemon's word for an end reaches the batch log within milliseconds of its coming.
WORD_PATIENCE = 5.0
# Slurm ends the batch script KillWait (30 s) after the requeue.
_CANCELS, _CANCEL_PAUSE = 3, 2.0

Requeued = Literal["requeued", "by-slurm", "forbidden", "refused", "cancelled"]


def requeue(
    attempt: Attempt,
    failed: Callable[[str, str], None],
    asked: Callable[[], str | None] = lambda: None,
    *,
    until: float | None = None,
    patience: float = WORD_PATIENCE,
    clock: Clock | None = None,
) -> Requeued:
    """Have Slurm start the job again, unless it already does, or somebody has asked for its end.

    Args:
        failed: called with the kind of a refusal and Slurm's words, as :class:`Retries` says.
        asked: the first reason to end the attempt that anybody has given until now (`cancelled`, say).
        until: when to give up a controller that does not answer, in Unix seconds; None: after the first try.
        patience: seconds that a reason may need to appear.
        clock: the time.

    Returns:
        "by-slurm" where Slurm requeues a preempted job after its end, "forbidden" where the controller
        refuses and a new job must continue, "refused" where no answer came.
    """
    clock = clock or Clock()
    retries = Retries(failed, until, clock)
    while True:
        view = query_job(attempt.job)
        kind, words = "transient", "the controller does not answer"
        # Without a view a requeue could hit a newer start: Slurm may have started it.
        if view is not None:
            settled = _already(attempt, view, asked, patience)
            if settled is not None:
                return settled
            answer = slurm.run(slurm.scontrol_requeue_command(attempt.job))
            if answer.returncode == 0:
                return _unless_cancelled(attempt, failed, asked, patience, clock)
            kind, words = (
                slurm.classify_requeue_error(answer.stderr),
                " ".join(answer.stderr.split()),
            )
        if kind == "pending":
            return "requeued"
        if kind not in ("transient", "unknown"):
            retries.report(kind, words)
            return "forbidden"
        if not retries.again(kind, words):
            return "refused" if kind == "transient" else _refused_for_good(attempt, asked, patience)


def _refused_for_good(
    attempt: Attempt, asked: Callable[[], str | None], patience: float
) -> Requeued:
    """Return "forbidden" after the last refusal, unless the job has changed since the look before it.

    A new job makes no second job of the run: it waits for the end of this job, and it owns the run from
    its submission on. If this job starts again all the same, ``require_free`` refuses that start.
    """
    view = query_job(attempt.job)
    if view is None:
        return "refused"
    return _already(attempt, view, asked, patience) or "forbidden"


def _already(
    attempt: Attempt, view: JobView, asked: Callable[[], str | None], patience: float
) -> Requeued | None:
    """Return the reason that makes a requeue needless or wrong; None: there is no reason."""
    if view.restarts > attempt.restart or view.state == "PENDING":
        return "requeued"
    if is_cancelled(attempt, view, asked, patience):
        return "cancelled"
    if view.preempted and slurm_requeues(attempt.job):
        return "by-slurm"
    return None


def is_cancelled(
    attempt: Attempt, view: JobView, asked: Callable[[], str | None], patience: float
) -> bool:
    """Return True if somebody cancels the job, by a fresh ``view`` of it and the reasons given until now.

    A job that Slurm is ending for an unknown reason counts as cancelled.
    """
    if cancelled_now(view):
        return True
    unknown = view.being_ended and only_log_has_reason(view, attempt)
    given = wait_for_word(asked, patience if unknown else 0.0)
    return (given or word_of(view, attempt, "")) == "cancelled"


def _unless_cancelled(
    attempt: Attempt,
    failed: Callable[[str, str], None],
    asked: Callable[[], str | None],
    patience: float,
    clock: Clock,
) -> Requeued:
    """Cancel a job again that was requeued during its cancellation.

    The requeue ends the attempt too, with a message in the log. The order of the two messages is that in
    which Slurm got the two requests: a cancellation after the requeue ends the waiting job anyway.
    """
    if wait_for_word(asked, patience) != "cancelled":
        return "requeued"
    problem = withdraw(attempt.job, clock)
    if problem is None:
        return "cancelled"
    failed(
        "cancel", f"{problem}; `scancel {attempt.job}` ends the job that waits for its next start"
    )
    return "requeued"


def withdraw(job: str, clock: Clock) -> str | None:
    """Cancel a job that waits; None when it is done, else Slurm's words."""
    words = ""
    for _ in range(_CANCELS):
        answer = slurm.run(slurm.scancel_command(job))
        if answer.returncode == 0:
            return None
        words = " ".join(answer.stderr.split())
        clock.sleep(_CANCEL_PAUSE)
    return words
