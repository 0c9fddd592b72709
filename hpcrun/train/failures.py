"""The failures of a rank: what it records and prints, and the exit code."""

import os
import sys
from collections.abc import Callable

from hpcrun import exit_codes
from hpcrun.errors import (
    NodeUnfit,
    NotTrainable,
    PeerFailed,
    PlannedStop,
    PrintedByRankZero,
    UserError,
)
from hpcrun.printing import say_aside
from hpcrun.ranks.signals import end_helpers
from hpcrun.run.attempt import Attempt, attempt_here
from hpcrun.run.directory import RunDirectory, RunError
from hpcrun.run.endings import is_cascade, record_failure
from hpcrun.run.failures.mistakes import is_mistake, may_pass_by_cause, passing
from hpcrun.run.journal.events import Saved, Started
from hpcrun.run.journal.journal import Journal
from hpcrun.run.journal.opening import Occupied, note_refusal
from hpcrun.slurm.placement import read_placement, scheduler
from hpcrun.storage.errors import ReadFailure
from hpcrun.storage.manifest import newest_manifest
from hpcrun.train.position import Position


def recorded_failures(
    run: RunDirectory, attempt: Attempt, rank: int, work: Callable[[Position], int]
) -> int:
    """Return the exit code of ``work``, the part of ``rank`` in the attempt; record an exception of it.

    Args:
        run: the run directory.
        attempt: the attempt.
        rank: the number of this rank.
        work: gets the position of the rank, and returns the exit code.

    Raises:
        BaseException: the exception of ``work``, if the disk refuses the record; or a KeyboardInterrupt.
    """
    position = Position()
    try:
        return work(position)
    except PrintedByRankZero:
        return exit_codes.BAD_INPUT
    except ReadFailure as error:
        # The nodes that failed to read are the cause, not the run: another start on other nodes may help.
        failed = error if error.here else PeerFailed(f"another rank could not read: {error}")
        return fail(run, attempt, rank, failed, position)
    except UserError as error:
        # If the run has trained before, this node is the cause, not the config.
        unfit = isinstance(error, NodeUnfit)
        # The nodes of an earlier start were fit, or may have been.
        worked = attempt.label != "0" or has_trained(run, attempt)
        own = error.certain or isinstance(error, RunError)  # For example checkpoints that are gone.
        if not own and (may_pass_by_cause(error) or passing(error) == "node"):
            # For example a task that reads its tokenizer from a server, or data that are not mounted here.
            return fail(run, attempt, rank, error, position)
        if rank == 0 and not (unfit and worked):
            end_helpers()  # As in fail(): the error may come from a step.
            if not isinstance(error, Occupied):
                note_refusal(run, attempt, error)
            return refuse(error)
        # A problem of this rank only: another start may help on another node.
        code = fail(run, attempt, rank, error, position, bad_input=unfit and not worked)
        return exit_codes.BAD_INPUT if isinstance(error, NotTrainable) else code
    # A task that calls sys.exit(0) is not finished: only the end of training returns DONE.
    except (Exception, SystemExit) as error:
        untrained = not position.step and not has_trained(run, attempt)
        bad_input = untrained and is_mistake(error)
        return fail(run, attempt, rank, error, position, bad_input=bad_input)


def has_trained(run: RunDirectory, attempt: Attempt) -> bool:
    """Return True if a start before ``attempt`` reached its steps; then a node may have caused an error."""
    if newest_manifest(run.checkpoints) is not None:
        return True
    try:
        return any(
            event.attempt != attempt for event in Journal(run).read().of_kind(Started, Saved)
        )
    except OSError:
        return True


def refuse(error: UserError) -> int:
    """Print ``error`` and return the exit code for bad input."""
    say_aside(f"hpcrun: {error}")
    return exit_codes.BAD_INPUT


def record_refusal(run: RunDirectory, error: UserError) -> None:
    """Record the failure of a rank that ends before its attempt has begun."""
    if scheduler(os.environ) == "direct" or not run.exists():
        return
    try:
        here = read_placement(os.environ)
        if here.job_id is not None:
            folder = run.attempt_logs(attempt_here(here.job_id, os.environ))
            plain = error.with_traceback(None)
            why = passing(error)
            bad = not why and not may_pass_by_cause(error)
            record_failure(folder, here.rank, plain, None, bad_input=bad, passing=why)
    except (UserError, OSError) as problem:
        print(f"hpcrun: cannot record the refusal: {problem}", file=sys.stderr, flush=True)


def fail(
    run: RunDirectory,
    attempt: Attempt,
    rank: int,
    error: BaseException,
    position: Position,
    *,
    bad_input: bool = False,
) -> int:
    """Record and print ``error``; return the exit code."""
    folder = run.attempt_logs(attempt)
    # First: dropping the traceback drops the data loader, which would wait for its processes.
    end_helpers()
    if isinstance(error, PlannedStop):
        error.__traceback__ = None
    try:
        why = "" if bad_input else passing(error)
        failure = record_failure(
            folder, rank, error, position.step, bad_input=bad_input, passing=why
        )
    except OSError as disk:
        print(f"hpcrun: cannot record the failure: {disk}", file=sys.stderr, flush=True)
        raise error from None
    if isinstance(error, UserError):
        print(f"hpcrun: rank {rank}: {error}", file=sys.stderr, flush=True)
    elif isinstance(error, OSError) and str(error.filename).startswith(f"{run.path}/"):
        # The failure is of a disk, not of the program; the record has the traceback.
        file = error.filename2 or error.filename
        reason = f"{file}: {error.strerror}; check its owner and the free space"
        print(f"hpcrun: rank {rank}: {reason}", file=sys.stderr, flush=True)
    elif is_cascade(failure):
        first_line = (failure.message.splitlines() or [""])[0]
        print(f"hpcrun: rank {rank} lost its peers: {first_line}", file=sys.stderr, flush=True)
    else:
        text = failure.traceback or f"{failure.kind}: {failure.message}"
        say_aside(*text.rstrip("\n").split("\n"))
    return exit_codes.BAD_INPUT if bad_input else exit_codes.FAILED
