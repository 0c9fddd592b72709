"""The end of an attempt: find its cause, record it, decide about a restart.

It runs once per attempt, outside the training processes (in the batch script, or in the local
cluster's controller): a rank that was killed can decide nothing.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hpcrun import exit_codes
from hpcrun.diagnose.brief import brief_cause, hopeless_cause
from hpcrun.diagnose.causes import Diagnosis, blames_node, first_cause
from hpcrun.diagnose.launching import launch_failure, setup_failure
from hpcrun.job.cause_table import (
    Evidence,
    classify,
    evidence_of,
    host_of,
)
from hpcrun.job.node_errors import concerns_a_node
from hpcrun.job.notifying import notification_of
from hpcrun.job.policy import Budgets, Decision, decide
from hpcrun.job.scheduler_view import NO_ENDING, Ending
from hpcrun.nodes.late_kills import ended_late
from hpcrun.run.attempt import Attempt
from hpcrun.run.directory import RunDirectory
from hpcrun.run.endings import (
    first_log,
    is_unfinished,
    read_exits,
    read_failures,
    read_hang,
    read_heard_stops,
    script_stop,
)
from hpcrun.run.files import read_json, write_hashed
from hpcrun.run.goodput import goodput
from hpcrun.run.journal.events import (
    AttemptRefused,
    BadInput,
    Cause,
    CopiesFound,
    Ended,
    Finished,
    NodeLost,
    Opened,
    Saved,
    Started,
    Stopped,
    Trained,
)
from hpcrun.run.journal.journal import Journal
from hpcrun.run.journal.state import NO_SIGN, PRUNED, START_SECONDS, State
from hpcrun.run.reports import published
from hpcrun.run.slow_nodes import STOPPED, slow_nodes
from hpcrun.storage.manifest import newest_manifest

# Seconds of reading the logs of a failed run.
_BRIEF = 3.0
_ORDERLY = (Cause.PREEMPTION, Cause.TIME_LIMIT, Cause.CONTINUED)


@dataclass(frozen=True)
class Classification:
    """The end of an attempt and what follows.

    ``step``: the newest committed step. ``diagnosis``: the first failure, if any. ``notification``: the name
    of the notification about the end; empty: none. ``state``: the state with this end, if it was read.
    """

    cause: Cause
    step: int | None
    line: str
    decision: Decision
    diagnosis: Diagnosis | None
    notification: str = ""
    state: State | None = field(default=None, compare=False)


def finalize(
    run: RunDirectory,
    attempt: Attempt,
    exit_code: int,
    budgets: Budgets | None,
    ending: Ending = NO_ENDING,
    *,
    setup: str | None = None,
    state: State | None = None,
) -> Classification:
    """Classify the end, append ``ended`` to the event log, and write result.json if no restart follows.

    Args:
        exit_code: the highest of the tasks' exit codes, as srun returns it.
        budgets: None if a person started the attempt, so that nothing starts it again. Rank 0 then calls this
            function itself, and does not see later failures of other ranks.
        ending: the scheduler's part in the end.
        setup: the command of the batch script that failed before the ranks started.
        state: the state of the run, if it has been read.

    Raises:
        OSError: the run directory cannot be written.
    """
    journal = Journal(run)
    state = journal.read() if state is None else state
    if budgets is None and not state.has_opened(attempt):
        final = Decision(False, "the start was refused")
        return Classification(Cause.BAD_INPUT, state.committed, "not opened", final, None)
    state = with_lost_announcement(run, state)
    if exit_code == exit_codes.DONE:
        state = _with_stop_of_other_ranks(run, state, attempt)
    if state.finished_before(attempt) and not state.has_opened(attempt):
        line = "an earlier start of the job has finished the run"
        final = Decision(False, "the training is done")
        return Classification(Cause.FINISHED, state.committed, line, final, None)
    evidence = _evidence(run, attempt, state, exit_code, ending, setup)
    if budgets is None:
        evidence = replace(evidence, of_node=False)
    cause, line = classify(evidence)
    diagnosis, step = evidence.diagnosis, state.committed
    crashed = diagnosis if cause is Cause.CRASH else None
    facts: dict[str, Any] = {}
    if crashed and crashed.failure and not blames_node(crashed):
        facts["failure"] = crashed.failure
    if crashed:
        facts |= _kind_of_crash(crashed, state, attempt)
    if cause in (Cause.PREEMPTION, Cause.TIME_LIMIT) and _ended_unsaved(
        run, attempt, state, evidence
    ):
        facts["unsaved"] = True
    step_at_end = crashed.step if crashed else step
    facts |= {"attempt": attempt, "cause": cause.value, "step": step_at_end}
    # Not the newest job of the log: this job may have failed before it wrote an event.
    own = state.after(Ended(**facts)).attempts_of(attempt.job)
    decision = _by_hand(cause) if budgets is None else decide(own, budgets)
    # A search would send a message for most of its trials.
    pruned = cause is Cause.CANCELLED and state.was_pruned
    about = "" if pruned else notification_of(cause, restart=decision.restart, attempts=len(own))
    named = cause in (Cause.CRASH, Cause.HANG) or (diagnosis is not None and diagnosis.unfit)
    ended = Ended(
        **facts,
        exit_code=evidence.exit_code,
        reason=line,
        host=host_of(evidence) if named else None,
        restart_allowed=decision.restart,
        decision=decision.reason,
    )
    journal.append(ended)
    state = state.after(ended)
    found = Classification(cause, step, line, decision, diagnosis, about, state)
    # A job that did no work must not replace the result of a finished run.
    finished = (read_json(run.result) or {}).get("state") == "finished"
    if not decision.restart and (state.has_opened(attempt) or not finished):
        conclude_run(run, state, found, _programs(evidence), by_hand=budgets is None)
    return found


def _kind_of_crash(crashed: Diagnosis, state: State, attempt: Attempt) -> dict[str, Any]:
    """Return what another crash must have in common with this one to be the same failure."""
    kind = {"crash": crashed.crash} if crashed.crash else {}
    begun = state.newest(Started, attempt)
    # A bad node fails at the first step of each start on it.
    at_start = begun is None or (crashed.step or 0) <= (begun.step or 0)
    passing = crashed.passing or crashed.follows or (blames_node(crashed) and at_start)
    return {**kind, **({"passing": True} if passing else {})}


def conclude_run(
    run: RunDirectory,
    state: State,
    ended: Classification,
    facts: Mapping[str, Any] | None = None,
    *,
    by_hand: bool = False,
) -> None:
    """Write result.json for a run whose last attempt has ended; raises OSError.

    Args:
        state: the state of the run, with the end.
        facts: further values for a finished script.
        by_hand: as for :func:`write_result`.
    """
    if ended.cause is not Cause.FINISHED:
        reason = ended.decision.reason
        write_result(run, state, ended.cause, ended.line, reason, ended.step, by_hand=by_hand)
        return
    # The result of a script is written here, because only now all of its ranks are known to have ended well.
    new = {"state": "finished", "time": round(time.time(), 3), **(facts or {})}
    _write_with_goodput(run, state, read_json(run.result) or new)


def _evidence(
    run: RunDirectory,
    attempt: Attempt,
    state: State,
    exit_code: int,
    ending: Ending,
    setup: str | None,
) -> Evidence:
    folder = run.attempt_logs(attempt)
    failures = read_failures(folder)
    evidence = evidence_of(
        state, attempt, exit_code, ending, None, unfinished=is_unfinished(folder)
    )
    if evidence.stopped is not None and evidence.stopped.cause == STOPPED:
        return replace(evidence, diagnosis=_of_slow_nodes(state, attempt, evidence.stopped))
    unlaunched = None
    if evidence.word is None:
        unlaunched = _unlaunched(state, attempt, setup, ending.log, folder)
    if unlaunched is not None:
        # The exit code means nothing if no rank started.
        return replace(evidence, exit_code=exit_codes.FAILED, diagnosis=unlaunched)
    of_node = concerns_a_node(state, attempt, failures)
    found = first_cause(failures, read_exits(folder), ending.log, read_hang(folder), folder)
    if evidence.word is None and not of_node and not _has_begun(state, attempt, found):
        found = _hopeless(run, attempt, state.nodes_of(attempt), found) or found
    late = found is not None and ended_late(state, attempt, found, time.time())
    return replace(evidence, diagnosis=found, of_node=of_node, late_kill=late)


def _has_begun(state: State, attempt: Attempt, found: Diagnosis | None) -> bool:
    """Return True if the attempt has worked for a minute, or if its end has another known reason."""
    opened = state.opening(attempt)
    if opened and time.time() - opened.time >= START_SECONDS:
        return True
    if any(state.of(attempt).of_kind(*_ENDS)):
        return True
    if found is None:
        return False
    return bool(found.step) or found.hang or found.bad_input or found.passing or blames_node(found)


_ENDS = (Saved, Stopped, Trained, Finished, NodeLost, BadInput, AttemptRefused)


def _hopeless(
    run: RunDirectory, attempt: Attempt, nodes: int, found: Diagnosis | None
) -> Diagnosis | None:
    """Return the cause that `hpcrun doctor` names, if a retry never helps: they must not disagree."""
    try:
        named = hopeless_cause(run, attempt, nodes)
    except OSError:
        return None
    if named is None:
        return None
    line = f"{named.evidence[0].text.strip()[:300]}: {named.cause}; {named.remedy}"
    known = found or Diagnosis("")
    return replace(known, line=line, rank=named.rank, host=named.node or known.host, bad_input=True)


def _of_slow_nodes(state: State, attempt: Attempt, stop: Stopped) -> Diagnosis:
    """Return the diagnosis of a stop to replace slow nodes: the next start avoids them, as unfit nodes."""
    hosts = tuple(map(str, stop.hosts or ()))
    # A node that has recovered since is replaced too.
    found = {one.host: one for one in slow_nodes(state.of(attempt)) if one.host in hosts}
    line = "; ".join(one.line for one in found.values()) or f"slow: {', '.join(hosts)}"
    host = hosts[0] if hosts else None
    rank = found[host].rank if host in found else None
    return Diagnosis(line, rank, host, stop.step, None, 0, node_fault=True, unfit=hosts)


def _ended_unsaved(run: RunDirectory, attempt: Attempt, state: State, evidence: Evidence) -> bool:
    """Return True if a script ended with exit code 0 after a signal, and has reported steps but no save."""
    stop = evidence.stopped
    if not evidence.script or stop is None or stop.exit_code != 0:
        return False
    return state.newest(Saved) is None and published(run.attempt_logs(attempt)).step is not None


def _programs(evidence: Evidence) -> dict[str, Any]:
    if not evidence.script:
        return {}
    opened = evidence.own.newest(Opened)
    ranks = opened.ranks if opened else None
    programs = {} if ranks is None else {"programs": ranks}
    copies = evidence.reason(CopiesFound, "")
    return {**programs, **({"reason": copies} if copies else {})}


def _unlaunched(
    state: State,
    attempt: Attempt,
    setup: str | None,
    batch_log: str,
    folder: Path,
) -> Diagnosis | None:
    if any(not isinstance(one, (*NO_SIGN, Ended)) for one in state.of(attempt).events):
        return None
    chain = state.chain(attempt.job)
    worked = any(one.attempt.job in chain for one in state.openings if one.attempt)
    if setup is not None:
        return setup_failure(setup, batch_log, worked=worked)
    return launch_failure(batch_log, first_log(folder), worked=worked, logs=folder)


def _by_hand(cause: Cause) -> Decision:
    if cause is Cause.FINISHED:
        return Decision(False, "the training is done")
    return Decision(
        False, "it was started by hand, so it is not restarted: run the same command to continue it"
    )


def with_lost_announcement(run: RunDirectory, state: State) -> State:
    """Return the run's state; add the newest commit if its attempt died before the event was written.

    Raises:
        OSError: the run directory cannot be read or written.
    """
    newest = newest_manifest(run.checkpoints)
    if newest is None:
        return state
    made = [record for record in state.attempts if record.attempt.owner == newest.owner]
    if not made or newest.step <= (made[0].committed or 0):
        return state
    # With the time of the commit: later steps are lost.
    when = round(newest.created, 3)
    saved = Saved(attempt=made[0].attempt, step=newest.step, time=when, found=True)
    Journal(run).append(saved)
    return state.after(saved)


def _with_stop_of_other_ranks(run: RunDirectory, state: State, attempt: Attempt) -> State:
    """Return the state, with ``stopped`` if a script ended on a signal that rank 0 received too late.

    All ranks may have ended with exit code 0 because the script saves on the signal. Then it is not finished.
    """
    folder = run.attempt_logs(attempt)
    heard = read_heard_stops(folder)
    if not heard:
        return state
    stop = state.newest(Stopped, attempt)
    # Rank 0 knows only its own work.
    ended_well = all(one.code == 0 for one in heard)
    if stop and (ended_well or not stop.done):
        return state
    done = ended_well and (published(folder).done or all(one.done for one in heard))
    stopped = script_stop(attempt, heard[0].cause, heard[0].code, done=done)
    Journal(run).append(stopped)
    return state.after(stopped)


def write_result(
    run: RunDirectory,
    state: State,
    cause: Cause,
    line: str,
    reason: str,
    step: int | None,
    *,
    by_hand: bool = False,
) -> None:
    """Write result.json for a run that ended before it was finished; raises OSError.

    Args:
        state: the state of the run.
        by_hand: a person started the attempt: preemption and time limit leave the run stopped, not failed.
    """
    word = "stopped" if by_hand and cause in _ORDERLY else "failed"
    reason = f"{line}; {reason}" if line else reason
    word = "cancelled" if cause is Cause.CANCELLED else word
    if word == "cancelled" and state.was_pruned:
        word, reason = "pruned", PRUNED
    when = round(time.time(), 3)
    _write_with_goodput(
        run,
        state,
        {"state": word, "cause": cause.value, "step": step, "reason": reason, "time": when},
    )
    if word == "failed":
        # For `hpcrun status`, which reads the logs of many runs in a fraction of a second.
        brief_cause(run, state, _BRIEF)


def _write_with_goodput(run: RunDirectory, state: State, result: Mapping[str, Any]) -> None:
    parts = goodput(state, time.time()).as_record()
    write_hashed(run.result, {**result, "goodput": parts})
