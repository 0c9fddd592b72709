"""The only module that asks Slurm to start a job again.

Observed with Slurm 22.05, because no manual describes it: Slurm requeues a job that is preempted without a
grace time, and its restart count rises while its processes still end. ``scontrol requeue`` succeeds for a job
that has ended, and kills one that has been started again. It succeeds for a job that is being cancelled too:
the job then waits for its next start. Only slurmstepd's message about the first of the two requests shows the
cancellation.

Since Slurm 24.05 the controller requeues a job that ends by itself in the grace time of its preemption, if
its PreemptMode is REQUEUE, whatever its exit code. ``scontrol requeue`` does not cancel this automatic
requeue: a job that also requeues itself starts once more after its next end, although it has finished. For
older versions such an end is a failure.
"""

import contextlib
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from hpcrun import slurm
from hpcrun.errors import ClusterError
from hpcrun.job.scheduler_view import (
    JobView,
    ask_job,
    cancelled_now,
    only_log_has_reason,
    query_job,
    wait_for_word,
    word_of,
)
from hpcrun.run.attempt import Attempt
from hpcrun.run.directory import RunDirectory
from hpcrun.run.journal.events import Submitted
from hpcrun.run.journal.journal import Journal
from hpcrun.run.trust import ForeignRun, fixed_script, own_content
from hpcrun.slurm.environment import scrub

# Seconds. slurmstepd's message about an end reaches the batch log within milliseconds.
WORD_PATIENCE = 5.0
# Slurm ends the batch script KillWait (30 s) after the requeue.
_CANCELS, _CANCEL_PAUSE = 3, 2.0

# Tries after a refusal in unknown words.
_UNKNOWN = 5
# Seconds.
_FIRST_PAUSE, _LONGEST_PAUSE = 5.0, 30.0
_SAY_EVERY = 300.0

Requeued = Literal["requeued", "by-slurm", "forbidden", "refused", "cancelled"]


@dataclass(frozen=True)
class Clock:
    """The clock and its sleep function; tests replace them."""

    now: Callable[[], float] = time.time
    sleep: Callable[[float], None] = time.sleep


class Retries:
    """The tries of one request.

    Args:
        failed: called with the kind of a failure (see ``classify_requeue_error``) and Slurm's message;
            at most every five minutes while the controller does not answer.
        until: retry a controller that does not answer until then (Unix seconds); None: one try.
        clock: the time.
    """

    def __init__(
        self, failed: Callable[[str, str], None], until: float | None, clock: Clock
    ) -> None:
        self._failed, self._until, self._clock = failed, until or 0.0, clock
        self._pause, self._unknown, self._said = _FIRST_PAUSE, 0, float("-inf")

    def report(self, kind: str, words: str) -> None:
        """Call ``failed``, unless a missing answer was reported less than five minutes ago."""
        now = self._clock.now()
        if kind != "transient" or now - self._said >= _SAY_EVERY:
            self._failed(kind, words)
            self._said = now

    def again(self, kind: str, words: str) -> bool:
        """Report the failure and wait for the next try; return False, without a wait, after the last."""
        self.report(kind, words)
        if kind == "transient":
            if self._clock.now() >= self._until:
                return False
        else:
            self._unknown += 1
            if self._unknown >= _UNKNOWN:
                return False
        self._clock.sleep(self._pause)
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        return True


def requeue(
    attempt: Attempt,
    failed: Callable[[str, str], None],
    asked: Callable[[], str | None] = lambda: None,
    *,
    until: float | None = None,
    patience: float = WORD_PATIENCE,
    clock: Clock | None = None,
) -> Requeued:
    """Make Slurm start the job again, unless it already does so, or a person or Slurm has ended the job.

    Args:
        failed: called with the kind of a refusal and Slurm's words, as :class:`Retries` says.
        asked: returns the first recorded reason to end the attempt, such as ``cancelled``.
        until: retry a controller that does not answer until then (Unix seconds); None: one try.
        patience: seconds in which a reason may still appear.
        clock: the time.

    Returns:
        "by-slurm" if Slurm requeues a preempted job after its end, "forbidden" if the controller refuses and
        a new job must continue, "refused" without an answer, or if scontrol cannot run.
    """
    clock = clock or Clock()
    retries = Retries(failed, until, clock)
    while True:
        view, shown = ask_job(attempt.job)
        kind, words = "transient", "the controller does not answer"
        if view is None and slurm.cannot_run(shown):
            # A retry until the time limit would hold the nodes for nothing.
            kind, words = "unknown", slurm.refusal_words(shown) or "scontrol cannot run"
        # Without the job's present state, a requeue could kill a newer start of the job.
        if view is not None:
            settled = already(attempt, view, asked, patience)
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
    """Return "forbidden" after the last refusal, unless the job's state has changed since then.

    The follow-up job does not run at the same time: it waits for the end of this job, and it owns the run
    from its submission on. If this job starts again nevertheless, ``require_free`` refuses that start.
    """
    view = query_job(attempt.job)
    if view is None:
        return "refused"
    return already(attempt, view, asked, patience) or "forbidden"


def already(
    attempt: Attempt,
    view: JobView,
    asked: Callable[[], str | None],
    patience: float = WORD_PATIENCE,
) -> Requeued | None:
    """Return the reason why a requeue is unnecessary or wrong; None without such a reason."""
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
    """Return True if the job is being cancelled, by its present state ``view`` and the recorded reasons.

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

    The requeue also ends the attempt, with a message in the log. The two messages have the order in which
    Slurm got the requests: a cancellation after the requeue ends the waiting job anyway.
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
    """Cancel a waiting job; return None after success, otherwise Slurm's message."""
    words = ""
    for _ in range(_CANCELS):
        answer = slurm.run(slurm.scancel_command(job))
        if answer.returncode == 0:
            return None
        words = " ".join(answer.stderr.split())
        clock.sleep(_CANCEL_PAUSE)
    return words


_SINCE = (24, 5)
_SETTING = re.compile(r"^(SLURM_VERSION|PreemptMode|PreemptType)\s*=\s*(\S+)", re.MULTILINE)
_MODE = re.compile(r"\bPreemptMode=(\S+)")


def slurm_requeues(job: str) -> bool:
    """Return True if Slurm itself starts ``job``, which runs in its grace time, again after its end.

    False if unknown: a job that starts once too often finds its run finished and ends immediately, while a
    job without a restart would lose its run.
    """
    config = slurm.run(["scontrol", "show", "config"]).stdout
    if not requeues_in_grace_time(config):
        return False
    fields = slurm.parse_show_job(slurm.run(slurm.scontrol_show_job_command(job)).stdout)
    if fields.get("Requeue") != "1":
        return False
    of_partition = ["scontrol", "show", "partition", fields.get("Partition", "")]
    of_qos = ["scontrol", "show", "assoc_mgr", "flags=qos", f"qos={fields.get('QOS', '')}"]
    described = slurm.run(of_qos if _by_qos(config) else of_partition).stdout
    return preempt_mode(config, described) == "REQUEUE"


def requeues_in_grace_time(config: str) -> bool:
    """Return True if this version of Slurm requeues such jobs, from ``scontrol show config``."""
    version = re.match(r"(\d+)\.(\d+)", dict(_SETTING.findall(config)).get("SLURM_VERSION", ""))
    return version is not None and (int(version[1]), int(version[2])) >= _SINCE


def preempt_mode(config: str, description: str) -> str | None:
    """Return the mode in which a job is preempted: REQUEUE, CANCEL, SUSPEND or OFF; None if unknown.

    Args:
        config: what ``scontrol show config`` prints.
        description: what ``scontrol`` prints about the job's partition or QOS.
    """
    found = _MODE.search(description)
    mode = found[1].upper() if found else ""
    # The QOS has no mode, so the mode of the cluster applies.
    if _by_qos(config) and mode == "OFF":
        mode = dict(_SETTING.findall(config)).get("PreemptMode", "").upper()
    return next((word for word in mode.split(",") if word not in ("", "GANG")), None)


def _by_qos(config: str) -> bool:
    return bool(dict(_SETTING.findall(config)).get("PreemptType") == "preempt/qos")


# Seconds; sbatch retries a controller that does not answer for longer than other commands.
_TIMEOUT = 60.0


class ContinuationError(Exception):
    """No new job continues the run; the text has the reason."""


def submit_successor(
    run: RunDirectory,
    attempt: Attempt,
    failed: Callable[[str, str], None],
    *,
    until: float | None = None,
    clock: Clock | None = None,
) -> str:
    """Submit the run's own batch script once more, to start after this job's end; return the job's id.

    The event ``submitted`` names this job in its field ``continues``, so the budgets continue. A
    submission that fails is tried again as a requeue is.

    Args:
        failed: called with the kind of a failure and Slurm's words, as :class:`Retries` says.
        until: retry a controller that does not answer until then (Unix seconds); None: one try.
        clock: the time.

    Raises:
        ContinuationError: there is no script that can be submitted again, sbatch refuses, or the run
            directory cannot be written; no job is left then.
    """
    if not run.batch_script.is_file():
        raise ContinuationError(
            f"{run.batch_script} is gone; `hpcrun resume {run.name}` continues the run"
        )
    retries = Retries(failed, until, clock or Clock())
    while True:
        try:
            job = _submit(run, attempt)
            break
        except ContinuationError as refusal:
            kind = slurm.classify_requeue_error(str(refusal))
            if not retries.again("transient" if kind == "transient" else "unknown", str(refusal)):
                raise
    try:
        _record(run, attempt, job)
    except OSError as error:
        slurm.run(slurm.scancel_command(job))
        raise ContinuationError(f"{run.events}: {error.strerror}") from error
    return job


def _submit(run: RunDirectory, attempt: Attempt) -> str:
    try:
        script, kept = fixed_script(run.batch_script, own_content(run.batch_script))
    except (OSError, ForeignRun) as error:
        raise ContinuationError(str(error)) from error
    command = [
        "sbatch",
        "--parsable",
        # afterany, because this job ends with any exit code; --dependency here overrides that of the script.
        f"--dependency=afterany:{attempt.job}",
        str(script),
    ]
    with kept or contextlib.nullcontext():
        answer = slurm.run(command, timeout=_TIMEOUT, environ=scrub(os.environ))
    if answer.returncode != 0:
        raise ContinuationError(slurm.refusal_words(answer) or "sbatch gave no reason")
    try:
        return slurm.parse_sbatch(answer.stdout)
    except ClusterError as error:
        raise ContinuationError(str(error)) from error


def _record(run: RunDirectory, attempt: Attempt, job: str) -> None:
    journal = Journal(run)
    before = journal.read().newest(Submitted)
    facts = before.known if before else {"executor": "slurm"}
    # The new job has this run only.
    journal.append(Submitted(attempt=Attempt(job, 0), **facts | {"continues": attempt.job}))
