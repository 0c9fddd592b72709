"""The beginning of an attempt: close the previous attempt, and ask the policy.

The batch step and the local cluster prepare an attempt before its ranks start. Where there is neither (srun
in an salloc, torchrun, the executor `debug`), the entry point of rank 0 does the same.
"""

import os
import sys
from pathlib import Path
from typing import Any

from hpcrun import exit_codes
from hpcrun.config import Config
from hpcrun.diagnose.read_log import scheduler_word
from hpcrun.errors import UserError
from hpcrun.job.finalize import with_lost_announcement, write_result
from hpcrun.job.ownership import require_free, require_own_number
from hpcrun.job.policy import Budgets, decide
from hpcrun.job.scheduler_view import batch_log
from hpcrun.run.attempt import Attempt, attempt_here
from hpcrun.run.directory import RunDirectory
from hpcrun.run.endings import read_hang
from hpcrun.run.files import read_lines
from hpcrun.run.journal.events import (
    AttemptRefused,
    Cause,
    Ended,
    Finished,
    Prepared,
)
from hpcrun.run.journal.journal import Journal
from hpcrun.run.journal.opening import (
    Occupied,
    Refused,
    already_finished,
    become_owner,
    note_refusal,
    require_new,
)
from hpcrun.run.journal.state import AttemptRecord, State
from hpcrun.slurm.own_config import load_own
from hpcrun.slurm.placement import job_id


def open_attempt(
    run: RunDirectory,
    attempt: Attempt,
    budgets: Budgets,
    state: State | None = None,
    **facts: Any,
) -> State:
    """Prepare ``attempt`` and make this process the run's owner; for a start without a supervisor.

    Args:
        run: the run directory.
        attempt: the attempt that begins.
        budgets: the restarts that the config allows.
        state: the state of the run, if it has been read.
        facts: the fields of the event ``opened``.

    Returns:
        The state after the opening.

    Raises:
        Occupied: another job has the run, or this job is cancelled.
        Refused: a budget is used up, and result.json says which; or this attempt was opened before.
        OSError: the run directory cannot be written.
    """
    state = Journal(run).read() if state is None else state
    executor = facts.get("executor")
    if executor == "slurm":
        _require_own(run, attempt, state)
        require_new(run, attempt, state)
    return become_owner(run, attempt, _admitted(run, attempt, budgets, state), **facts)


def may_begin(run: RunDirectory, attempt: Attempt, config: Config, executor: str) -> bool:
    """Prepare ``attempt``; return False, with a line and its records, if it may not begin.

    Args:
        run: the run directory.
        attempt: the attempt that begins.
        config: the config of the run.
        executor: slurm or local.
    """
    try:
        prepare_attempt(run, attempt, Budgets.of(config), executor)
    except (Occupied, Refused) as refusal:
        print(f"hpcrun: {refusal}", flush=True)
        if isinstance(refusal, Refused):
            note_refusal(run, attempt, refusal)
        return False
    except (UserError, OSError) as error:
        # Without the event, rank 0 prepares the attempt, and its failure is recorded.
        print(f"hpcrun: {attempt.owner} is not prepared: {error}", flush=True)
    return True


def prepare_attempt(run: RunDirectory, attempt: Attempt, budgets: Budgets, executor: str) -> None:
    """Check that ``attempt`` may begin, and log it: rank 0 then opens the attempt without a decision.

    Calls before the ranks have begun may be repeated, for example after a kill of this process.

    Args:
        run: the run directory.
        attempt: the attempt that begins.
        budgets: the restarts that the config allows.
        executor: slurm or local.

    Raises:
        Occupied: another job has the run.
        Refused: a budget is used up; result.json says which.
        OSError: the run directory cannot be written.
    """
    journal = Journal(run)
    state = journal.read()
    if executor == "slurm":
        _require_own(run, attempt, state)
    _admitted(run, attempt, budgets, state)
    cluster = os.environ.get("SLURM_CLUSTER_NAME")
    place: dict[str, Any] = {"cluster": cluster} if cluster else {}
    journal.append(Prepared(attempt=attempt, executor=executor, **place))


def _require_own(run: RunDirectory, attempt: Attempt, state: State) -> None:
    require_free(run, attempt, state)
    require_own_number(run, attempt, state)


def _admitted(run: RunDirectory, attempt: Attempt, budgets: Budgets, state: State) -> State:
    """Record the missing ends of earlier attempts and ask the policy; return the state.

    An earlier attempt without a recorded end lost its node, unless Slurm's messages in its batch log
    give another reason: the attempt itself could not record one.
    """
    journal = Journal(run)
    before = state = with_lost_announcement(run, state)
    for record in before.attempts:
        if record.cause is None and record.attempt != attempt:
            cause, reason = _end_of(run, before, record, attempt)
            ended = Ended(
                attempt=record.attempt,
                cause=cause.value,
                step=record.committed,
                reason=reason,
                last_seen=_last_sign(run, before, record),
                # For another job, a person has requested the next start.
                restart_allowed=record.attempt.job in before.chain(attempt.job),
            )
            journal.append(ended)
            state = state.after(ended)
    # Another job is another submission by a person and starts with fresh budgets.
    chain = state.chain(attempt.job)
    history = [
        one
        for one in state.attempts_of_newest_job
        if one.attempt.job in chain and one.attempt != attempt
    ]
    # After a start that finished, only the result is missing: this start writes it again.
    if history and history[-1].cause not in (None, Cause.FINISHED):
        decision = decide(history, budgets)
        if not decision.restart:
            refused = AttemptRefused(attempt=attempt, reason=decision.reason)
            journal.append(refused)
            state = state.after(refused)
            write_result(run, state, history[-1].cause, "", decision.reason, state.committed)
            raise Refused(f"{run.name}: not started again: {decision.reason}")
    if not history:
        # The result of an earlier job: `submit` removes it, sbatch by hand does not.
        run.result.unlink(missing_ok=True)
    return state


def _end_of(
    run: RunDirectory, state: State, record: AttemptRecord, successor: Attempt
) -> tuple[Cause, str]:
    if state.newest(Finished, record.attempt):
        return Cause.FINISHED, "finished"
    word = scheduler_word(batch_log(run, record.attempt))
    words = ["preemption", "time-limit"]
    # A job that Slurm starts again was not cancelled.
    if record.attempt.job != successor.job:
        words.append("cancelled")
        word = "cancelled" if state.asked_to_end(record.attempt) else word
    if word in words:
        return Cause(word), f"{word}; killed before it could record its end"
    hang = read_hang(run.attempt_logs(record.attempt))
    if hang is not None:
        return Cause.HANG, hang.line
    return (
        Cause.NODE_FAILURE,
        "ended without an exit record: its node failed, or all its processes died together",
    )


def _last_sign(run: RunDirectory, state: State, record: AttemptRecord) -> float:
    """Return the last time (Unix seconds) at which an attempt without a recorded end was known to run."""
    reported = [event.time for event in state.of(record.attempt).events]
    logged = [
        line["time"]
        for line in read_lines(run.metrics)
        if line.get("restart") == record.attempt.restart and line.get("time", 0.0) >= record.started
    ]
    return float(max([record.started, *reported, *logged]))


def main() -> int:
    """Prepare the attempt of the local cluster that this environment belongs to; 2: it may not begin."""
    run, job = RunDirectory(Path(sys.argv[1]).absolute()), job_id(os.environ)
    try:
        config, attempt = load_own(run), attempt_here(str(job), os.environ)
        if already_finished(run, attempt) or may_begin(run, attempt, config, "local"):
            return exit_codes.DONE
    except (UserError, OSError):
        # The ranks report it.
        return exit_codes.DONE
    return exit_codes.BAD_INPUT


if __name__ == "__main__":
    sys.exit(main())
