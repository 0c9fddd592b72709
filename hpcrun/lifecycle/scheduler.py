"""What Slurm says of a job that is ending, and the one place that asks it for another start.

Measured with Slurm 22.05, because no manual says it: a job that is preempted without a grace time is
requeued by Slurm, and counts one restart more while its processes still end. One that is preempted with
a grace time and ends by itself before that has passed is *not* requeued: it counts as failed. And
``scontrol requeue`` succeeds for a job that has ended, and kills one that has been started again.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from hpcrun.cluster import slurm
from hpcrun.diagnose.causes import scheduler_word
from hpcrun.run.events import Attempt

_TRIES, _PAUSE = 5, 6.0

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
    *,
    tries: int = _TRIES,
    pause: float = _PAUSE,
) -> bool:
    """Have Slurm start the job again, unless it already does; whether it will.

    Args:
        failed: told of each refusal: its kind (see ``slurm.classify_requeue_error``) and Slurm's words.
        tries: how often a controller that does not answer is asked.
        pause: seconds between two tries.
    """
    for number in range(tries):
        view = look_at(attempt.job)
        if view is not None and (view.restarts > attempt.restart or view.state == "PENDING"):
            return True
        # Without a view a requeue could hit a newer start: nobody knows that there is none.
        kind, words = "transient", "the controller does not answer"
        if view is not None:
            asked = slurm.run(slurm.scontrol_requeue_command(attempt.job))
            if asked.returncode == 0:
                return True
            kind, words = (
                slurm.classify_requeue_error(asked.stderr),
                " ".join(asked.stderr.split()),
            )
            if kind == "pending":
                return True
        failed(kind, words)
        if kind not in ("transient", "unknown"):
            return False
        if number + 1 < tries:
            time.sleep(pause)
    return False
