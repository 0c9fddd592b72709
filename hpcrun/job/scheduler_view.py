"""Slurm's part in the end of an attempt: first the controller's facts, then the messages in the logs.

Observed with Slurm 22.05: the state is COMPLETING while processes end, for every reason; the restart count
of a job rises as soon as Slurm requeues it. Newer versions also show, in JSON, the state that COMPLETING
hides. A job that Slurm ends for an unknown reason counts as cancelled, because a requeue would undo a
cancellation.
"""

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, cast

from hpcrun import slurm
from hpcrun.diagnose.read_log import scheduler_word
from hpcrun.run.attempt import Attempt
from hpcrun.run.directory import RunDirectory
from hpcrun.run.journal.state import State

SchedulerWord = Literal["preemption", "cancelled", "time-limit", "node-failure"]

# The messages of slurmstepd reach the batch log within milliseconds.
_PATIENCE, _LOOK = 5.0, 0.05
# Slurm may send its warning signal a minute early (sbatch(1), --signal), and checks every 30 s.
EARLY = 90.0
# Watchdogs and timeouts of torch count the suspended time, so they may end a job soon after its resume.
_AFTER_SUSPENSION = 300.0

_STATES = {
    "CANCELLED": "cancelled",
    "PREEMPTED": "preemption",
    "TIMEOUT": "time-limit",
    "NODE_FAIL": "node-failure",
}


@dataclass(frozen=True)
class JobView:
    """A job as the controller sees it; times in Unix seconds.

    ``restarts``: the controller's count. ``preempted``: the job runs in the grace time of a
    preemption, or ends because of one. ``base``: the states that COMPLETING hides, if Slurm shows them.
    ``timed_out``: the job used its whole time limit. ``suspended``: time of the newest suspension, or of its
    end. ``script_killed``: SIGKILL has ended the batch script. Slurm then ends the job, and no user has asked
    for it: a requested end kills all processes of the batch script together, if any.
    """

    state: str
    restarts: int
    preempted: bool
    end_time: float | None
    base: frozenset[str] = frozenset()
    timed_out: bool = False
    suspended: float | None = None
    script_killed: bool = False

    @property
    def being_ended(self) -> bool:
        """True while Slurm ends the job, before its batch script has exited."""
        return self.state == "COMPLETING"


@dataclass(frozen=True)
class Ending:
    """The scheduler's part in the end of an attempt.

    ``word``: the reason, if the scheduler ended the attempt; ``why``: the same for a person. ``log``: the
    lines of the batch script, of srun and slurmstepd. ``limit_near``: the time limit was near, so a warning
    signal announced it. ``warned_by_term``: this signal is SIGTERM. ``was_not_requested``: Slurm reports that
    the job still runs, so its SIGTERM was not a cancellation. ``signalled``: it still runs after the line of
    a cancellation, which a signal to the batch script leaves too. ``just_resumed``: the job was suspended
    until a moment before.
    """

    word: SchedulerWord | None = None
    log: str = ""
    limit_near: bool = False
    warned_by_term: bool = False
    was_not_requested: bool = False
    signalled: bool = False
    just_resumed: bool = False
    why: str = ""


NO_ENDING = Ending()


def query_job(job: str) -> JobView | None:
    """Ask the controller for ``job``; return None if it does not answer or does not know the job."""
    return ask_job(job)[0]


def ask_job(job: str) -> tuple[JobView | None, slurm.Completed]:
    """Ask the controller for ``job``, as :func:`query_job`; return the answer of scontrol too."""
    shown = slurm.run(slurm.scontrol_show_job_command(job))
    if shown.returncode != 0:
        return None, shown
    base: frozenset[str] = frozenset()
    facts = slurm.parse_show_job(shown.stdout)
    if facts.get("JobState") == "COMPLETING":
        reported = slurm.run(slurm.scontrol_show_job_command(job, as_json=True))
        base = slurm.parse_job_states(reported.stdout) - {"COMPLETING"}
    return view_of(facts, base), shown


def view_of(facts: dict[str, str], base: frozenset[str] = frozenset()) -> JobView:
    """Build the view from the fields of ``scontrol show job``; a missing field counts as unknown."""
    restarts = facts.get("Restarts", "")
    limit, ran = (slurm.seconds(facts.get(key, "")) for key in ("TimeLimit", "RunTime"))
    return JobView(
        state=facts.get("JobState", ""),
        restarts=int(restarts) if restarts.isdecimal() else 0,
        preempted=slurm.unix_time(facts.get("PreemptTime", "None")) is not None,
        end_time=slurm.unix_time(facts.get("EndTime", "Unknown")),
        base=base,
        timed_out=facts.get("Reason") == "TimeLimit"
        or (limit is not None and ran is not None and ran >= limit),
        suspended=slurm.unix_time(facts.get("SuspendTime", "None")),
        script_killed=facts.get("ExitCode", "").endswith(f":{int(signal.SIGKILL)}"),
    )


def ending_of(
    run: RunDirectory,
    attempt: Attempt,
    *,
    lead: float = 0.0,
    patience: float = _PATIENCE,
) -> Ending:
    """Find Slurm's part in the end of ``attempt``.

    Args:
        lead: seconds from the warning signal to the time limit.
        patience: seconds to wait for slurmstepd's messages, if only these have the reason.
    """
    view = query_job(attempt.job)
    if only_log_has_reason(view, attempt) and run.batch_log(attempt.job).is_file():
        wait_for_word(lambda: scheduler_word(batch_log(run, attempt)), patience)
    running = view is not None and view.state == "RUNNING"
    resumed, log = view.suspended if view else None, batch_log(run, attempt)
    word = word_of(view, attempt, log)
    killed = view is not None and view.script_killed and word == "node-failure"
    return Ending(
        word,
        log,
        why="the batch script was killed by SIGKILL" if killed else "",
        limit_near=view is not None and _limit_near(view, lead),
        # A cancelled job is COMPLETING, and a requeued job is PENDING. An unreachable controller cancels
        # nothing; slurmstepd would have written a message about an earlier cancellation.
        was_not_requested=view is None or running,
        # `scancel --batch --signal=TERM` leaves the line of a cancellation, and the job runs on.
        signalled=running and word == "cancelled",
        just_resumed=resumed is not None and time.time() - resumed < _AFTER_SUSPENSION,
    )


def _limit_near(view: JobView, lead: float) -> bool:
    # A cancellation sets the end time to the time of the cancellation.
    if view.end_time is None or view.preempted or view.state != "RUNNING":
        return False
    return view.end_time - time.time() <= lead + EARLY


def reason_given(run: RunDirectory, attempt: Attempt, state: State) -> str | None:
    """Return the reason to end the attempt that a person or Slurm has recorded so far, or None."""
    if state.asked_to_end(attempt):
        return "cancelled"
    return scheduler_word(batch_log(run, attempt))


def word_of(view: JobView | None, attempt: Attempt, batch_log: str) -> SchedulerWord | None:
    """Return Slurm's reason for ending ``attempt``; None if Slurm did not end it.

    If the controller already counts a newer start, it shows the facts of that start. The reason is then in
    the log or in the time of a preemption; without either, the job lost the node of its batch script.
    """
    reported = scheduler_word(batch_log)
    if view is None:
        return cast("SchedulerWord | None", reported)
    if view.restarts > attempt.restart:
        preempted = "preemption" if "PREEMPTED" in view.base else None
        return cast("SchedulerWord", reported or preempted or "node-failure")
    base = next((_STATES[state] for state in _STATES if state in view.base), None)
    fact = base or reported or ("preemption" if view.preempted else _STATES.get(view.state))
    if fact is None and view.being_ended:
        known = "node-failure" if view.script_killed else "cancelled"
        fact = "time-limit" if view.timed_out else known
    return cast("SchedulerWord | None", fact)


def cancelled_now(view: JobView) -> bool:
    """Return True if Slurm shows a cancellation, whatever happened before (for example a preemption)."""
    return "CANCELLED" in (view.state, *view.base)


def only_log_has_reason(view: JobView | None, attempt: Attempt) -> bool:
    """Return True if the reason for an end may be in the log before the controller shows it."""
    if view is None:
        return True
    if view.restarts > attempt.restart:
        return view.being_ended and "PREEMPTED" not in view.base
    known = view.base & set(_STATES) or view.preempted or view.timed_out
    # slurmstepd has only KillWait until it kills this program too, and writes a reason before it kills.
    return view.being_ended and not (known or view.script_killed)


def wait_for_word(word: Callable[[], str | None], patience: float) -> str | None:
    """Call ``word`` until it returns an answer, for ``patience`` seconds at most."""
    late = time.monotonic() + patience
    while (found := word()) is None and time.monotonic() < late:
        time.sleep(_LOOK)
    return found


def batch_log(run: RunDirectory, attempt: Attempt) -> str:
    """Return the lines of ``attempt`` that the batch script, srun and slurmstepd have written."""
    try:
        text = run.batch_log(attempt.job).read_text(errors="replace")
    except OSError:
        return ""
    _, found, mine = text.rpartition(f"hpcrun: attempt {attempt.owner} ")
    return mine.partition(f"\nhpcrun: attempt {attempt.job}-")[0] if found else ""
