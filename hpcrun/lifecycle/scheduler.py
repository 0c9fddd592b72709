"""What Slurm says of a job that is ending, and the one place that asks it for another start.

Measured with Slurm 22.05, because no manual says it: a job that is preempted without a grace time is
requeued by Slurm, and counts one restart more while its processes still end. One that is preempted with
a grace time and ends by itself before that has passed is *not* requeued: it counts as failed. And
``scontrol requeue`` succeeds for a job that has ended, and kills one that has been started again. It
succeeds for one that is being cancelled too, which then waits for its next start as if nobody had asked
for its end; only what the step daemon wrote when the first of the two came tells of it.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from hpcrun.cluster import slurm
from hpcrun.diagnose.causes import scheduler_word
from hpcrun.run.events import Attempt

_TRIES, _PAUSE = 5, 6.0
# The step daemon's word for an end reaches the batch log within milliseconds of its coming.
_WORD, _LOOK = 5.0, 0.05
# Slurm ends the batch script KillWait (30 s) after the requeue.
_CANCELS, _CANCEL_PAUSE = 3, 2.0

Requeued = Literal["requeued", "refused", "cancelled"]

_STATES = {
    "PREEMPTED": "preemption",
    "CANCELLED": "cancelled",
    "TIMEOUT": "time-limit",
    "NODE_FAIL": "node-failure",
}


@dataclass(frozen=True)
class JobView:
    """A job as the controller sees it: ``restarts`` it has counted, ``end_time`` in Unix seconds.

    ``preempted``: it runs in the grace time of a preemption.
    """

    state: str
    restarts: int
    preempted: bool
    end_time: float | None


def look_at(job: str) -> JobView | None:
    """Ask the controller for ``job``; None where it does not answer, or does not know it."""
    shown = slurm.run(slurm.scontrol_show_job_command(job))
    if shown.returncode != 0:
        return None
    facts = slurm.parse_show_job(shown.stdout)
    restarts = facts.get("Restarts", "")
    return JobView(
        state=facts.get("JobState", ""),
        restarts=int(restarts) if restarts.isdecimal() else 0,
        preempted=slurm.unix_time(facts.get("PreemptTime", "None")) is not None,
        end_time=slurm.unix_time(facts.get("EndTime", "Unknown")),
    )


def end_of(
    attempt: Attempt, log: Callable[[], str], *, patience: float = _WORD
) -> tuple[JobView | None, str | None]:
    """How the controller sees the job of ``attempt``, and Slurm's reason for ending it, if it does.

    Args:
        log: reads the batch log of the attempt. A job that is being ended has its
            reason there in a moment, also where the controller that ended it does not answer any more.
    """
    view = look_at(attempt.job)
    if view is None or view.state == "COMPLETING":
        _wait_for(lambda: scheduler_word(log()), patience)
    return view, word_of(view, attempt, log())


def word_of(view: JobView | None, attempt: Attempt, batch_log: str) -> str | None:
    """Slurm's reason for ending ``attempt``; None when the end is not its doing.

    Its words in the batch log come first: while processes end, the state is COMPLETING for every
    reason. A job that has been requeued without such a word has lost the node of its batch script.
    """
    told = scheduler_word(batch_log)
    if told is not None or view is None:
        return told
    if view.restarts > attempt.restart:
        return "node-failure"
    return "preemption" if view.preempted else _STATES.get(view.state)


def requeue(
    attempt: Attempt,
    failed: Callable[[str, str], None],
    asked: Callable[[], str | None] = lambda: None,
    *,
    tries: int = _TRIES,
    pause: float = _PAUSE,
    patience: float = _WORD,
) -> Requeued:
    """Have Slurm start the job again, unless it already does, or somebody has asked for its end.

    Args:
        failed: told of each refusal: its kind (see ``slurm.classify_requeue_error``) and Slurm's words.
        asked: the first reason to end the attempt that anybody has given until now (`cancelled`, say).
        tries: how often a controller that does not answer is asked.
        pause: seconds between two tries.
        patience: seconds that a reason may need to be told.
    """
    for number in range(tries):
        view = look_at(attempt.job)
        if view is not None and (view.restarts > attempt.restart or view.state == "PENDING"):
            return "requeued"
        # Without a view a requeue could hit a newer start: nobody knows that there is none.
        kind, words = "transient", "the controller does not answer"
        if view is not None:
            ending = view.state in ("COMPLETING", "CANCELLED")
            if _wait_for(asked, patience if ending else 0.0) == "cancelled":
                return "cancelled"
            told = slurm.run(slurm.scontrol_requeue_command(attempt.job))
            if told.returncode == 0:
                return _unless_cancelled(attempt, failed, asked, patience)
            kind, words = slurm.classify_requeue_error(told.stderr), " ".join(told.stderr.split())
            if kind == "pending":
                return "requeued"
        failed(kind, words)
        if kind not in ("transient", "unknown"):
            return "refused"
        if number + 1 < tries:
            time.sleep(pause)
    return "refused"


def _unless_cancelled(
    attempt: Attempt,
    failed: Callable[[str, str], None],
    asked: Callable[[], str | None],
    patience: float,
) -> Requeued:
    """Cancel once more what was being cancelled when it was requeued.

    The requeue ends the attempt too, with a word of its own: whichever comes first came first to Slurm,
    and a cancellation that comes second finds a job that waits, and ends it.
    """
    if _wait_for(asked, patience) != "cancelled":
        return "requeued"
    words = ""
    for _ in range(_CANCELS):
        told = slurm.run(slurm.scancel_command(attempt.job))
        if told.returncode == 0:
            return "cancelled"
        words = " ".join(told.stderr.split())
        time.sleep(_CANCEL_PAUSE)
    failed("cancel", f"{words}; `scancel {attempt.job}` ends what waits for its next start")
    return "requeued"


def _wait_for(word: Callable[[], str | None], patience: float) -> str | None:
    late = time.monotonic() + patience
    while (found := word()) is None and time.monotonic() < late:
        time.sleep(_LOOK)
    return found
