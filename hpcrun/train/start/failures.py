"""Record the failure of a rank, print it, and choose the exit code."""

import os
import sys

from hpcrun.checkpoint.storage.manifest import newest_manifest
from hpcrun.diagnose.causes import is_cascade
from hpcrun.errors import ErrorOnAllRanks, PlannedStop, UserError
from hpcrun.job import exitcodes
from hpcrun.job.second_start import tried_elsewhere
from hpcrun.printing import say_aside
from hpcrun.ranks.launchers import read_placement, scheduler
from hpcrun.ranks.signals import end_helpers
from hpcrun.run.directory import RunDirectory
from hpcrun.run.endings import node_name, record_failure
from hpcrun.run.events import Attempt, note, read_events
from hpcrun.train.phase import Position


def has_trained(run: RunDirectory, attempt: Attempt) -> bool:
    """Return True if a start before ``attempt`` reached its steps; then a node may have caused an error."""
    if newest_manifest(run.checkpoints) is not None:
        return True
    try:
        return any(
            event.what in ("started", "saved") and event.attempt != attempt
            for event in read_events(run)
        )
    except OSError:
        return True


def has_started(run: RunDirectory, attempt: Attempt) -> bool:
    """Return True if the nodes of a start before ``attempt`` were fit, or may have been."""
    if has_trained(run, attempt):
        return True
    try:
        return attempt.restart > 0 and not tried_elsewhere(read_events(run), attempt)
    except OSError:
        return True


def refuse(error: UserError) -> int:
    """Print ``error`` and return the exit code for bad input."""
    say_aside(f"hpcrun: {error}")
    return exitcodes.BAD_INPUT


def note_refusal(run: RunDirectory, attempt: Attempt, error: UserError) -> None:
    """Write rank 0's event ``bad-input``, with the facts about nodes that the classification needs."""
    known = error if isinstance(error, ErrorOnAllRanks) else None
    note(
        run,
        "bad-input",
        attempt,
        reason=str(error),
        kind=type(error).__name__,
        host=(known and known.host) or node_name(),
        shared=known is not None and known.everywhere,
        certain=error.certain,
    )


def record_refusal(run: RunDirectory, error: UserError) -> None:
    """Record the failure of a rank that ends before its attempt has begun.

    The classification counts the nodes with such a record.
    """
    if scheduler(os.environ) == "direct" or not run.exists():
        return
    try:
        here = read_placement(os.environ)
        if here.job_id is not None:
            folder = run.attempt_logs(here.job_id, here.restart_count)
            plain = error.with_traceback(None)
            record_failure(folder, here.rank, plain, None, bad_input=True)
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
    folder = run.attempt_logs(attempt.job, attempt.restart)
    # First: dropping the traceback drops the data loader, which would wait for its processes.
    end_helpers()
    if isinstance(error, PlannedStop):
        error.__traceback__ = None
    try:
        failure = record_failure(folder, rank, error, position.step, bad_input=bad_input)
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
    return exitcodes.BAD_INPUT if bad_input else exitcodes.FAILED
