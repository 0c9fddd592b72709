"""The end of an attempt, from the exit code of its ranks to the exit code of its batch script.

The local cluster's controller finalizes an attempt in the same way, through `hpcrun finalize`.
"""

import contextlib
import sys
import time
import traceback
from dataclasses import dataclass

from hpcrun.config import Config, Job, load_resolved
from hpcrun.diagnose.read_log import scheduler_word
from hpcrun.errors import UserError
from hpcrun.job import policy as exitcodes
from hpcrun.job.bad_nodes import exclude_bad_nodes, record_bad_nodes
from hpcrun.job.finalize import Classification, finalize, write_result
from hpcrun.job.history import asked_to_end, last_committed, successor
from hpcrun.job.notifying import KEY, NO_SENDER, Due, Sender, start
from hpcrun.job.ownership import Occupied, refusal, require_free
from hpcrun.job.policy import Budgets, Clock, of_script
from hpcrun.job.requeue import (
    WORD_PATIENCE,
    ContinuationError,
    is_cancelled,
    requeue,
    submit_successor,
    take_over_dependents,
    withdraw,
)
from hpcrun.job.scheduler_view import (
    Ending,
    JobView,
    SchedulerWord,
    batch_log,
    ending_of,
    query_job,
    reason_given,
)
from hpcrun.run.directory import RunDirectory
from hpcrun.run.events import Attempt, Cause, Event, note, read_events
from hpcrun.run.files import read_json

# Seconds after which a file server that has recovered answers at the latest.
_TRIES, _PAUSE = 3, 5.0
# Another attempt follows, and must not wait for a slow server.
_SENDER_PATIENCE = 3.0
# Without a controller the time limit is not enforced, so there is time to wait for an upgrade of Slurm.
_AT_LEAST, _WITHOUT_LIMIT = 3600.0, 86400.0


class RunTakenOver(Exception):
    """Another attempt owns the run; the text names it. ``code``: the batch script's exit code."""

    def __init__(self, words: str, code: int) -> None:
        super().__init__(words)
        self.code = code


@dataclass(frozen=True)
class EndedAttempt:
    """The end of the attempt, the run's config, and the job as the controller saw it at the end of its ranks.

    ``sender``: the process that sends the notification of this end.
    """

    classification: Classification
    config: Config
    view: JobView | None
    sender: Sender = NO_SENDER

    @property
    def job(self) -> Job:
        """The run's `job:` section."""
        return self.config.job


def finalize_attempt(
    run: RunDirectory,
    attempt: Attempt,
    exit_code: int,
    *,
    on_slurm: bool,
    scheduler: SchedulerWord | None = None,
    limit_near: bool = False,
    setup: str | None = None,
    out_of_time: bool = False,
) -> "EndedAttempt":
    """Find the cause of the end, record it, and decide about a restart.

    Args:
        exit_code: the highest of the ranks' exit codes.
        on_slurm: ask Slurm why the attempt has ended; otherwise ``scheduler`` and ``limit_near``
            have the reason.
        setup: the command that failed before the ranks started.
        out_of_time: the ranks were killed because of the time limit.

    Raises:
        RunTakenOver: another attempt or another job has the run.
        OSError: the run directory cannot be read or written.
    """
    newer = successor(read_events(run), attempt)
    if newer is not None:
        # Slurm took this node for dead and started the job elsewhere.
        words = f"{newer.owner} owns the run now; {attempt.owner} leaves the run unchanged"
        raise RunTakenOver(words, exitcodes.FAILED)
    refused = refusal(run, attempt)
    if refused is not None:
        raise RunTakenOver(refused, exitcodes.BAD_INPUT)
    if setup is not None and on_slurm:
        # No rank has asked.
        try:
            require_free(run, attempt)
        except Occupied as taken:
            raise RunTakenOver(str(taken), exitcodes.BAD_INPUT) from taken
    ending = Ending(None, scheduler, batch_log(run, attempt))
    if on_slurm:
        ending = ending_of(run, attempt)
    config = load_resolved(run.config)
    budgets = Budgets(**config.restarts.model_dump())
    # Started before the decision, so that the notification is sent even if this process dies.
    sender = start(run, config.watch)
    try:
        classification = finalize(
            run,
            attempt,
            exit_code,
            of_script(budgets) if config.command else budgets,
            scheduler=ending.word or ("time-limit" if out_of_time else None),
            batch_log=ending.log,
            limit_near=limit_near or ending.limit_near(float(config.job.signal_lead)),
            was_not_requested=on_slurm and ending.was_not_requested,
            just_resumed=ending.just_resumed,
            warned_by_term=config.warn_signal == "TERM",
            setup=setup,
            notify_on=config.watch.notify_on if config.watch.notify else (),
        )
    finally:
        sender.release()
    _say(f"{classification.cause.value}: {classification.line}")
    _say(classification.decision.reason)
    return EndedAttempt(classification, config, ending.view, sender)


def conclude(
    run: RunDirectory,
    attempt: Attempt,
    exit_code: int,
    *,
    setup: str | None = None,
    end_time: float | None = None,
    own_script: bool = False,
    packed: bool = False,
    out_of_time: bool = False,
    clock: Clock | None = None,
) -> int:
    """Finalize the attempt, requeue its job if the policy allows it, return the batch script's exit code.

    0: the training is done, or the job has been requeued. 75: the run is to continue, but this step has not
    requeued the job. Any other code: the run has ended.

    Args:
        end_time: of the job, in Unix seconds; None without a limit.
        own_script: a person wrote the batch script, so hpcrun cannot submit it again.
        packed: other runs share the job, which is requeued after the end of all of them.
        out_of_time: the ranks were killed because of the time limit.
        clock: the time.
    """
    clock = clock or Clock()
    ended: EndedAttempt | None = None
    for number in range(1, _TRIES + 1):
        try:
            ended = finalize_attempt(
                run, attempt, exit_code, on_slurm=True, setup=setup, out_of_time=out_of_time
            )
            break
        except RunTakenOver as other:
            _say(str(other))
            return other.code
        except OSError as error:
            complain(f"the end of {attempt.owner} cannot be recorded: {error}")
            if number == _TRIES:
                return _given_up(run, attempt, exit_code, "free some space there")
            clock.sleep(_PAUSE)
        except Exception as error:
            if not isinstance(error, UserError):
                traceback.print_exc()
            complain(f"the end of {attempt.owner} cannot be classified: {error}")
            return _given_up(run, attempt, exit_code, "mend the cause")
    assert ended is not None
    if not ended.classification.decision.restart:
        # Also without a restart of this run: the user's other runs exclude the node.
        record_bad_nodes(run, attempt, ended.classification)
        ended.sender.wait()
        return final_code(ended.classification, exit_code)
    code = exitcodes.UNFINISHED
    if not packed:
        code = _start_again(run, attempt, ended, end_time, own_script, clock)
    else:
        # The requeue knows only the recorded end, without the diagnosis.
        record_bad_nodes(run, attempt, ended.classification)
    # Slurm ends the sender with this script; the next attempt then sends again.
    ended.sender.wait(_SENDER_PATIENCE)
    return code


def _given_up(run: RunDirectory, attempt: Attempt, exit_code: int, remedy: str) -> int:
    """Stop a run with an end that cannot be recorded; return the batch script's exit code.

    The next attempt records this end, as after the loss of a node.
    """
    with contextlib.suppress(OSError):
        if (read_json(run.result) or {}).get("state") == "finished":
            return exitcodes.DONE
    reason = f"no job continues {run.name}: {remedy}, then `hpcrun resume {run.name}`"
    complain(reason)
    sender = start(run, None)
    ended = Event("ended", time.time(), attempt, None, None, {"reason": reason})
    sender.release(Due("failed", attempt, ended))
    sender.wait()
    return exit_code or exitcodes.FAILED


def _notify_given_up(
    run: RunDirectory, attempt: Attempt, ended: EndedAttempt | None, reason: str, name: str
) -> None:
    """Send the notification of a run that no job continues although the policy allows a restart."""
    if ended is None or not ended.config.watch.notify:
        return
    asked = {KEY: name} if name in ended.config.watch.notify_on else {}
    sender = start(run, ended.config.watch)
    note(
        run,
        "given-up",
        attempt,
        cause=ended.classification.cause.value,
        reason=reason,
        **asked,
    )
    sender.wait()


def _start_again(
    run: RunDirectory,
    attempt: Attempt,
    ended: EndedAttempt | None,
    end_time: float | None,
    own_script: bool,
    clock: Clock,
) -> int:
    def failed(kind: str, words: str) -> None:
        note(run, "requeue-failed", attempt, cause=kind, reason=words)
        what = "not cancelled" if kind == "cancel" else "not requeued yet"
        complain(f"{what}: {words}")

    def asked() -> str | None:
        return reason_now(run, attempt, ended)

    until = latest(end_time, clock)
    became = requeue(attempt, failed, asked, until=until, clock=clock)
    if became == "cancelled":
        return cancelled_after_all(run, attempt, ended)
    if became == "by-slurm":
        _say(
            "Slurm requeues this job, because the job ends within the grace time of its preemption"
        )
        return exitcodes.UNFINISHED
    if became == "forbidden":
        return continue_in_another_job(run, attempt, ended, own_script, until, clock)
    if became == "refused":
        return exitcodes.UNFINISHED
    _exclude_bad_nodes(run, attempt, ended, attempt.job)
    return exitcodes.DONE


def latest(end_time: float | None, clock: Clock) -> float:
    """Return the time (Unix seconds) until which to retry while the controller does not answer."""
    now = clock.now()
    return max(now + _WITHOUT_LIMIT if end_time is None else end_time, now + _AT_LEAST)


def _exclude_bad_nodes(
    run: RunDirectory, attempt: Attempt, ended: EndedAttempt | None, waiting: str
) -> None:
    """Record the failed node, and exclude nodes that fail often from the job ``waiting``.

    Slurm changes the excluded nodes of a pending job only. At this point no signal ends this process.
    """
    if ended is not None:
        after, hours = ended.job.exclude_after, ended.job.exclude_hours
        record_bad_nodes(run, attempt, ended.classification)
        classifications = [ended.classification]
        exclude_bad_nodes(
            [run], attempt, classifications, after=after, hours=hours, waiting=waiting
        )


def reason_now(run: RunDirectory, attempt: Attempt, ended: EndedAttempt | None) -> str | None:
    """Return the first reason to end the attempt from a person or Slurm, as far as files can be read."""
    try:
        return reason_given(run, attempt, ended.view if ended else None)
    except OSError as error:
        complain(f"{run.events}: {error.strerror}; only the reason from Slurm is known")
        return scheduler_word(batch_log(run, attempt))


def cancelled_after_all(run: RunDirectory, attempt: Attempt, ended: EndedAttempt | None) -> int:
    """Write the result of a run that was cancelled after the decision to start it again."""
    _say("cancelled after its end: it is not started again")
    try:
        events = read_events(run)
        if not asked_to_end(events, attempt):
            note(run, "cancelled", attempt)
        classification = ended and ended.classification
        cause, line = (
            (classification.cause.value, classification.line) if classification else ("its end", "")
        )
        reason = f"cancelled before its restart after {cause}"
        write_result(run, Cause.CANCELLED, line, reason, last_committed(events))
        _notify_given_up(run, attempt, ended, reason, "cancelled")
    except OSError as error:
        complain(f"{run.result}: {error.strerror}")
    return exitcodes.TERMINATED


def continue_in_another_job(
    run: RunDirectory,
    attempt: Attempt,
    ended: EndedAttempt | None,
    own_script: bool,
    until: float,
    clock: Clock,
) -> int:
    """Submit the follow-up job of a job that Slurm does not requeue; return the batch script's exit code."""

    def failed(kind: str, words: str) -> None:
        note(run, "requeue-failed", attempt, cause=kind, reason=words)
        complain(f"no job continues {run.name} yet: {words}")

    try:
        if own_script:
            raise ContinuationError(
                "hpcrun does not know the options of your batch script: submit the script again, or "
                f"continue with `hpcrun resume {run.name}`"
            )
        job = submit_successor(run, attempt, failed, until=until, clock=clock)
    except ContinuationError as problem:
        note(run, "requeue-failed", attempt, cause="no-successor", reason=str(problem))
        complain(f"no job continues {run.name}: {problem}")
        reason = f"no job continues the run: {problem}"
        _notify_given_up(run, attempt, ended, reason, "stopped")
        return exitcodes.UNFINISHED
    _say(f"Slurm does not requeue this job: job {job} continues {run.name} after its end")
    view = query_job(attempt.job)
    asked = reason_now(run, attempt, ended)
    if asked == "cancelled" or (
        view is not None
        and is_cancelled(attempt, view, lambda: reason_now(run, attempt, ended), WORD_PATIENCE)
    ):
        problem_words = withdraw(job, clock)
        if problem_words is None:
            if ended is not None:
                record_bad_nodes(run, attempt, ended.classification)
            return cancelled_after_all(run, attempt, ended)
        complain(f"not cancelled: {problem_words}; `scancel {job}` ends it")
    moved = take_over_dependents(attempt.job, job)
    if moved:
        _say(f"jobs that depended on this job now depend on job {job}: {', '.join(moved)}")
    _exclude_bad_nodes(run, attempt, ended, job)
    return exitcodes.UNFINISHED


def final_code(classification: Classification, code: int) -> int:
    """Return a batch script's exit code if no attempt follows: 0 only for a finished training."""
    if classification.cause is Cause.FINISHED:
        return exitcodes.DONE
    if classification.cause is Cause.CANCELLED:
        return exitcodes.TERMINATED
    if classification.cause is Cause.SAVE_FAILED:
        return exitcodes.SAVE_FAILED
    if classification.cause is Cause.BAD_INPUT:
        return exitcodes.BAD_INPUT
    # 75 would ask for a requeue.
    return code if code not in (exitcodes.DONE, exitcodes.UNFINISHED) else exitcodes.FAILED


def _say(words: str) -> None:
    print(f"hpcrun: {words}", flush=True)


def complain(words: str) -> None:
    print(f"hpcrun: {words}", file=sys.stderr, flush=True)
