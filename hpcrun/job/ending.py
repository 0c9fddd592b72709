"""The end of an attempt, from the exit code of its ranks to the exit code of its batch script.

The local cluster's controller finalizes an attempt in the same way, through `hpcrun finalize`.
"""

import contextlib
import signal
import subprocess
import sys
import traceback
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hpcrun import exit_codes
from hpcrun.config import Config, Job
from hpcrun.diagnose.read_log import scheduler_word
from hpcrun.errors import UserError
from hpcrun.job import in_place, notifying
from hpcrun.job.bad_nodes import exclude_bad_nodes, record_bad_nodes
from hpcrun.job.finalize import Classification, conclude_run, finalize, write_result
from hpcrun.job.ownership import Occupied, load_own, refusal, require_free
from hpcrun.job.policy import Budgets, Decision
from hpcrun.job.requeue import (
    WORD_PATIENCE,
    Clock,
    ContinuationError,
    is_cancelled,
    requeue,
    submit_successor,
    withdraw,
)
from hpcrun.job.scheduler_view import Ending, batch_log, ending_of, query_job, reason_given
from hpcrun.job.srun import BatchJob, RanksEnd, step_name
from hpcrun.job.step_process import arrived_signals, was_upgraded
from hpcrun.run.attempt import Attempt
from hpcrun.run.directory import RunDirectory
from hpcrun.run.files import read_json
from hpcrun.run.journal.events import CancelRequested, Cause, Ended, GivenUp, RequeueFailed
from hpcrun.run.journal.journal import Journal
from hpcrun.run.journal.state import State

if TYPE_CHECKING:
    from hpcrun.nodes.job_nodes import JobNodes

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
    """The end of the attempt, and the run's config.

    ``sender``: the command that gets the notification of this end, if there is one.
    """

    classification: Classification
    config: Config
    sender: "subprocess.Popen[bytes] | None" = None

    @property
    def job(self) -> Job:
        """The run's `job:` section."""
        return self.config.job


def finalize_attempt(
    run: RunDirectory,
    attempt: Attempt,
    exit_code: int,
    ending: Ending | None = None,
    *,
    config: Config | None = None,
    setup: str | None = None,
    stuck: str | None = None,
) -> EndedAttempt:
    """Find the cause of the end, record it, and decide about a restart.

    Args:
        exit_code: the highest of the ranks' exit codes.
        ending: the part of the scheduler in the end; None: ask Slurm why the attempt has ended.
        config: the run's config; None: read here, after the check of its owner.
        setup: the command that failed before the ranks started.
        stuck: why Slurm created no step, which counts as a failure of a node.

    Raises:
        RunTakenOver: another attempt or another job has the run.
        UserError: the run is not this user's or not what was submitted, or its config is damaged.
        OSError: the run directory cannot be read or written.
    """
    config = config or load_own(run)
    # Slurm's answer may take seconds: a request that came meanwhile counts.
    ending = ending or ending_of(run, attempt, lead=float(config.job.signal_lead))
    state = Journal(run).read()
    _require_owned(run, state, attempt)
    if setup is not None:
        # No rank has asked.
        try:
            require_free(run, attempt, state)
        except Occupied as taken:
            raise RunTakenOver(str(taken), exit_codes.BAD_INPUT) from taken
    if stuck is not None and ending.word is None:
        ending = replace(ending, word="node-failure", why=f"Slurm created no step: {stuck}")
    ending = replace(ending, warned_by_term=config.warn_signal == "TERM")
    budgets = Budgets(**config.restarts.budgets, script=bool(config.command))
    found = finalize(run, attempt, exit_code, budgets, ending, setup=setup, state=state)
    about = notifying.Notification(
        found.notification,
        attempt,
        found.cause.value,
        found.line,
        found.decision.reason,
        found.step,
        found.diagnosis.host if found.diagnosis else None,
    )
    sender = notifying.start(run, config.watch, about) if found.notification else None
    named = found.line.startswith(f"{found.cause.value}: ")
    _say(found.line if named else f"{found.cause.value}: {found.line}")
    _say(found.decision.reason)
    return EndedAttempt(found, config, sender)


def _require_owned(run: RunDirectory, state: State, attempt: Attempt) -> None:
    newer = state.successor(attempt)
    if newer is not None:
        # Slurm took this node for dead and started the job elsewhere.
        words = f"{newer.owner} owns the run now; {attempt.owner} leaves the run unchanged"
        raise RunTakenOver(words, exit_codes.FAILED)
    refused = refusal(run, state, attempt)
    if refused is not None:
        raise RunTakenOver(refused, exit_codes.BAD_INPUT)


def _recorded_end(run: RunDirectory, attempt: Attempt) -> EndedAttempt | None:
    """Return the newest recorded end in the start of the job of ``attempt``, without its diagnosis."""
    try:
        ends = [
            one
            for one in Journal(run).read().of_kind(Ended)
            if one.attempt and one.attempt.is_of_start(attempt)
        ]
        if not ends:
            return None
        return EndedAttempt(_classification(ends[-1]), load_own(run))
    except (OSError, UserError, ValueError) as error:
        complain(f"{run.name}: its recorded end cannot be read: {error}")
        return None


def _classification(ended: Ended) -> Classification:
    return Classification(
        Cause(ended.cause),
        ended.step,
        ended.reason or "",
        Decision(bool(ended.restart_allowed), ended.decision or ""),
        None,
    )


@dataclass(frozen=True)
class Conclusion:
    """The exit code for the batch script, or the attempt that follows inside the allocation."""

    code: int
    following: Attempt | None = None


def conclude(
    run: RunDirectory,
    job: BatchJob,
    ranks: RanksEnd,
    clock: Clock | None = None,
    nodes: "JobNodes | None" = None,
    *,
    own_script: bool = False,
) -> Conclusion:
    """Finalize the attempt, and start the run again if the policy allows it.

    The caller blocks the stop signals and starts the following attempt. Exit code 0: the training is done, or
    the job has been requeued. 75: the run is to continue, but this step has not requeued the job. Any other
    code: the run has ended. ``own_script``: a person wrote the batch script.
    """
    attempt, clock = job.attempt, clock or Clock()
    alive = f"Slurm creates no step: {ranks.stuck}" if ranks.stuck else None
    lost_step = nodes is not None and nodes.has_lost_step
    if ranks.killed and not lost_step and not ranks.stuck:
        # Ranks that survive their srun would write after the recorded end.
        alive = in_place.end_step(attempt, step_name(attempt))
    until = latest(job.end_time, clock)
    launched = ranks.started and (lost_step or in_place.was_launched(run, attempt))
    if attempt.in_place and not launched:
        before = _recorded_end(run, attempt)
        if before is not None:
            # Slurm starts no step, too few nodes are left, or the set-up does not work twice. That is no
            # failure of the run.
            _say(f"{attempt.owner} could not start its ranks")
            return _NextStart(run, attempt, before, until, own_script, clock).requeue()
    try:
        ended = _finalized(run, attempt, ranks, clock)
    except RunTakenOver as other:
        _say(str(other))
        return Conclusion(other.code)
    except Exception as error:
        return Conclusion(_unrecorded(run, attempt, ranks.code, error))
    # Also without a restart of this run: the user's other runs exclude the node.
    record_bad_nodes(run, attempt, ended.classification)
    if not ended.classification.decision.restart:
        notifying.wait(ended.sender)
        return Conclusion(final_code(ended.classification, ranks.code))
    again = _NextStart(run, attempt, ended, until, own_script, clock).choose(nodes, alive)
    if again.following is None:
        # Slurm ends the command with this script.
        notifying.wait(ended.sender, _SENDER_PATIENCE)
    return again


def requeue_after_kill(run: RunDirectory, job: BatchJob, *, own_script: bool) -> int:
    """Finalize the attempt of a killed batch step, requeue its job, and return the exit code.

    The end uses the budget for node failures. Slurm ends ranks that still run.

    Raises:
        OSError: the run directory cannot be read.
    """
    clock, why = Clock(), "the batch step was killed"
    _say(why)
    state = Journal(run).read()
    known = [one for one in state.attempts if one.attempt.is_of_start(job.attempt)]
    attempt = known[-1].attempt if known else job.attempt
    ended, ranks = None, RanksEnd(128 + signal.SIGKILL)
    try:
        if known and known[-1].cause:
            _require_owned(run, state, attempt)
            ended = _recorded_end(run, attempt)
        ended = ended or _finalized(run, attempt, ranks, clock, Ending("node-failure", why=why))
        found = ended.classification
        if not found.decision.restart and not run.result.exists():
            conclude_run(run, found.state or state, found)
    except RunTakenOver as other:
        _say(str(other))
        return other.code
    except Exception as error:
        return _unrecorded(run, attempt, ranks.code, error)
    if not found.decision.restart:
        notifying.wait(ended.sender)
        return final_code(found, ranks.code)
    until = latest(job.end_time, clock)
    again = _NextStart(run, attempt, ended, until, own_script, clock).requeue()
    notifying.wait(ended.sender, _SENDER_PATIENCE)
    return again.code


def _finalized(
    run: RunDirectory,
    attempt: Attempt,
    ranks: RanksEnd,
    clock: Clock,
    ending: Ending | None = None,
) -> EndedAttempt:
    """Finalize the attempt; try again while the file server does not answer."""
    for _ in range(_TRIES - 1):
        try:
            return _finalized_once(run, attempt, ranks, ending)
        except OSError as error:
            complain(f"the end of {attempt.owner} cannot be recorded: {error}")
            clock.sleep(_PAUSE)
    return _finalized_once(run, attempt, ranks, ending)


def _finalized_once(
    run: RunDirectory, attempt: Attempt, ranks: RanksEnd, ending: Ending | None
) -> EndedAttempt:
    return finalize_attempt(run, attempt, ranks.code, ending, setup=ranks.failed, stuck=ranks.stuck)


def _unrecorded(run: RunDirectory, attempt: Attempt, exit_code: int, error: Exception) -> int:
    """Stop a run with an end that cannot be recorded; return the batch script's exit code.

    The next attempt records this end, as after the loss of a node.
    """
    if not isinstance(error, OSError | UserError):
        traceback.print_exc()
    complain(f"the end of {attempt.owner} cannot be recorded: {error}")
    with contextlib.suppress(OSError):
        if (read_json(run.result) or {}).get("state") == "finished":
            return exit_codes.DONE
    remedy = "free some space there" if isinstance(error, OSError) else "correct the cause"
    reason = f"no job continues {run.name}: {remedy}, then `hpcrun resume {run.name}`"
    complain(reason)
    with contextlib.suppress(OSError, UserError):
        watch = load_own(run).watch
        about = notifying.Notification("failed", attempt, "", reason)
        notifying.wait(notifying.start(run, watch, about))
    return exit_code or exit_codes.FAILED


@dataclass(frozen=True)
class _NextStart:
    """The next start of a run that the policy starts again after ``attempt``.

    ``until``: the time (Unix seconds) until which to ask a controller that does not answer.
    """

    run: RunDirectory
    attempt: Attempt
    ended: EndedAttempt
    until: float
    own_script: bool
    clock: Clock

    def choose(self, nodes: "JobNodes | None", obstacle: str | None) -> Conclusion:
        """Let the next attempt start. The only place that chooses how.

        Args:
            obstacle: why no step can follow, if that is known already.
        """
        try:
            obstacle = obstacle or self.in_place_obstacle(nodes)
        except Exception as error:
            # It costs a requeue and not the run.
            traceback.print_exc()
            obstacle = str(error)
        if obstacle is None:
            _say("the next attempt starts inside the allocation")
            return Conclusion(exit_codes.UNFINISHED, self.attempt.following)
        _say(f"no start inside the allocation: {obstacle}")
        return self.requeue()

    def in_place_obstacle(self, nodes: "JobNodes | None" = None) -> str | None:
        """Return why the run cannot start again as a new step of the job, or None. Ends the old step."""
        attempt, job, found = self.attempt, self.ended.job, self.ended.classification
        try:
            state = found.state or Journal(self.run).read()
        except OSError as error:
            return str(error)
        obstacle = in_place.attempt_obstacle(
            state,
            attempt,
            found.cause,
            wanted=self.ended.config.restarts.in_place,
            watched=nodes is not None,
        )
        if obstacle is not None:
            return obstacle
        allocation = in_place.read_allocation(
            attempt, found, after=job.exclude_after, hours=job.exclude_hours
        )
        if nodes is not None:
            dead, avoided = nodes.without_bad_nodes(
                allocation.nodes, allocation.dead, allocation.avoided, found.diagnosis
            )
            allocation = replace(allocation, dead=dead, avoided=avoided)
        lead = float(job.signal_lead)
        obstacle = in_place.allocation_obstacle(attempt, allocation, self.clock.now(), lead)
        if obstacle is None and nodes is not None and nodes.has_lost_step:
            obstacle = nodes.end_lost_step()
        elif obstacle is None:
            obstacle = in_place.end_step(attempt, step_name(attempt))
        if obstacle is None and was_upgraded():
            obstacle = "hpcrun was upgraded while the job ran"
        # Last: nothing may come between these checks and the start.
        arrived = arrived_signals()
        if obstacle is None and arrived:
            obstacle = f"{min(arrived).name} arrived"
        return obstacle or self._request()

    def _request(self) -> str | None:
        """Return the request of a person against a start in place, as far as files can be read."""
        try:
            state = Journal(self.run).read()
        except OSError as error:
            self._complain_of_log(error)
            state = State(())
        if reason_given(self.run, self.attempt, state) == "cancelled":
            return "the run is cancelled"
        asked = state.asked_to_requeue(self.attempt)
        return "`hpcrun preempt` asked for a requeue" if asked else None

    def requeue(self) -> Conclusion:
        """Let Slurm start the job again."""
        became = requeue(
            self.attempt, self._failed, self._reason, until=self.until, clock=self.clock
        )
        if became == "requeued":
            self._exclude_bad_nodes(self.attempt.job)
            return Conclusion(exit_codes.DONE)
        if became == "cancelled":
            return Conclusion(self._cancelled())
        if became == "forbidden":
            return Conclusion(self._continue_in_another_job())
        if became == "by-slurm":
            _say("Slurm requeues this job, because it ends in the grace time of its preemption")
        return Conclusion(exit_codes.UNFINISHED)

    def _failed(self, kind: str, words: str) -> None:
        Journal(self.run).note(RequeueFailed(attempt=self.attempt, cause=kind, reason=words))
        complain(f"{'not cancelled' if kind == 'cancel' else 'not requeued yet'}: {words}")

    def _exclude_bad_nodes(self, waiting: str) -> None:
        """Exclude bad nodes from the job ``waiting``; Slurm changes the nodes of a pending job only."""
        job, found = self.ended.job, self.ended.classification
        after, hours = job.exclude_after, job.exclude_hours
        exclude_bad_nodes(self.run, self.attempt, found, waiting, after=after, hours=hours)

    def _reason(self) -> str | None:
        """Return the reason of a person or of Slurm to end the attempt, as far as files can be read."""
        try:
            return reason_given(self.run, self.attempt, Journal(self.run).read())
        except OSError as error:
            self._complain_of_log(error)
            return scheduler_word(batch_log(self.run, self.attempt))

    def _complain_of_log(self, error: OSError) -> None:
        complain(f"{self.run.events}: {error.strerror}; only the reason from Slurm is known")

    def _cancelled(self) -> int:
        _say("cancelled after its end: it is not started again")
        found = self.ended.classification
        reason = f"cancelled before its restart after {found.cause.value}"
        try:
            journal = Journal(self.run)
            state = journal.read()
            if not state.asked_to_end(self.attempt):
                journal.note(CancelRequested(attempt=self.attempt))
                state = journal.read()
            write_result(self.run, state, Cause.CANCELLED, found.line, reason, state.committed)
        except OSError as error:
            complain(f"{self.run.result}: {error.strerror}")
        self._notify_given_up(reason, "cancelled")
        return exit_codes.TERMINATED

    def _notify_given_up(self, reason: str, name: str) -> None:
        """Record and notify that no job continues the run although the policy allows a restart."""
        cause = self.ended.classification.cause.value
        Journal(self.run).note(GivenUp(attempt=self.attempt, cause=cause, reason=reason))
        about = notifying.Notification(name, self.attempt, cause, reason)
        notifying.wait(notifying.start(self.run, self.ended.config.watch, about))

    def _continue_in_another_job(self) -> int:
        """Submit the follow-up job of a job that Slurm does not requeue; return the exit code."""
        run, attempt = self.run, self.attempt
        try:
            if self.own_script:
                raise ContinuationError(
                    "hpcrun does not know the options of your batch script: submit the script again, or "
                    f"continue with `hpcrun resume {run.name}`"
                )
            job = submit_successor(run, attempt, self._failed, until=self.until, clock=self.clock)
        except ContinuationError as problem:
            failed = RequeueFailed(attempt=attempt, cause="no-successor", reason=str(problem))
            Journal(run).note(failed)
            complain(f"no job continues {run.name}: {problem}")
            self._notify_given_up(f"no job continues the run: {problem}", "stopped")
            return exit_codes.UNFINISHED
        _say(
            f"Slurm does not requeue this job: job {job} continues {run.name} after its end; submit the jobs "
            "that wait for this job (--dependency) again, because Slurm cancels them"
        )
        view = query_job(attempt.job)
        if self._reason() == "cancelled" or (
            view is not None and is_cancelled(attempt, view, self._reason, WORD_PATIENCE)
        ):
            kept = withdraw(job, self.clock)
            if kept is None:
                return self._cancelled()
            complain(f"not cancelled: {kept}; `scancel {job}` ends it")
        self._exclude_bad_nodes(job)
        return exit_codes.UNFINISHED


def latest(end_time: float | None, clock: Clock) -> float:
    """Return the time (Unix seconds) until which to retry while the controller does not answer."""
    now = clock.now()
    return max(now + _WITHOUT_LIMIT if end_time is None else end_time, now + _AT_LEAST)


def final_code(classification: Classification, code: int) -> int:
    """Return a batch script's exit code if no attempt follows: 0 only for a finished training."""
    fixed = {
        Cause.FINISHED: exit_codes.DONE,
        Cause.CANCELLED: exit_codes.TERMINATED,
        Cause.SAVE_FAILED: exit_codes.SAVE_FAILED,
        Cause.BAD_INPUT: exit_codes.BAD_INPUT,
    }
    # 75 would ask for a requeue.
    other = code if code not in (exit_codes.DONE, exit_codes.UNFINISHED) else exit_codes.FAILED
    return fixed.get(classification.cause, other)


def _say(words: str) -> None:
    print(f"hpcrun: {words}", flush=True)


def complain(words: str) -> None:
    """Print ``words`` to the standard error."""
    print(f"hpcrun: {words}", file=sys.stderr, flush=True)
