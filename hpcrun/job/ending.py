"""The end of an attempt, from the exit code of its ranks to the exit code of its batch script.

The local cluster's controller finalizes an attempt in the same way, through `hpcrun finalize`.
"""

import contextlib
import signal
import traceback
from dataclasses import replace
from typing import TYPE_CHECKING

from hpcrun import exit_codes
from hpcrun.config import Config
from hpcrun.errors import UserError
from hpcrun.job import notifying
from hpcrun.job.bad_nodes import record_bad_nodes
from hpcrun.job.finalize import Classification, conclude_run, finalize
from hpcrun.job.ownership import refusal, require_free
from hpcrun.job.policy import Budgets, Decision
from hpcrun.job.restart import new_step
from hpcrun.job.restart.next_start import Conclusion, EndedAttempt, NextStart, complain, say_line
from hpcrun.job.restart.requeue import Clock
from hpcrun.job.scheduler_view import Ending, ending_of
from hpcrun.job.srun import BatchJob, RanksEnd, step_name
from hpcrun.run.attempt import Attempt
from hpcrun.run.directory import RunDirectory
from hpcrun.run.files import read_json
from hpcrun.run.journal.events import Cause, Ended
from hpcrun.run.journal.journal import Journal
from hpcrun.run.journal.opening import Occupied
from hpcrun.run.journal.state import State
from hpcrun.slurm.own_config import load_own

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
    # Slurm's answer may take seconds: a request that comes in this time counts.
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
    budgets = Budgets.of(config)
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
    say_line(found.line if named else f"{found.cause.value}: {found.line}")
    say_line(found.decision.reason)
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
        alive = new_step.end_step(attempt, step_name(attempt))
    until = latest(job.end_time, clock)
    launched = ranks.started and (ranks.refused or lost_step or new_step.was_launched(run, attempt))
    if attempt.in_place and not launched:
        before = _recorded_end(run, attempt)
        if before is not None:
            # Slurm starts no step, too few nodes are left, or the set-up does not work twice. That is no
            # failure of the run.
            say_line(f"{attempt.owner} could not start its ranks")
            return NextStart(run, attempt, before, until, own_script, clock).requeue()
    try:
        ended = _finalized(run, attempt, ranks, clock)
    except RunTakenOver as other:
        say_line(str(other))
        return Conclusion(other.code)
    except Exception as error:
        return Conclusion(_unrecorded(run, attempt, ranks.code, error))
    # Also without a restart of this run: the user's other runs exclude the node.
    record_bad_nodes(run, attempt, ended.classification)
    if not ended.classification.decision.restart:
        notifying.wait(ended.sender)
        return Conclusion(final_code(ended.classification, ranks.code))
    again = NextStart(run, attempt, ended, until, own_script, clock).choose(nodes, alive)
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
    say_line(why)
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
        say_line(str(other))
        return other.code
    except Exception as error:
        return _unrecorded(run, attempt, ranks.code, error)
    if not found.decision.restart:
        notifying.wait(ended.sender)
        return final_code(found, ranks.code)
    until = latest(job.end_time, clock)
    again = NextStart(run, attempt, ended, until, own_script, clock).requeue()
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
