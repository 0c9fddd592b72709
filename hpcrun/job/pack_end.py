"""The requeue of a job that several runs share, after the end of all of them."""

from collections.abc import Mapping, Sequence

from hpcrun.config import load_resolved
from hpcrun.errors import UserError
from hpcrun.job import exitcodes
from hpcrun.job.bad_nodes import exclude_bad_nodes
from hpcrun.job.end.finalize import Classification
from hpcrun.job.ending import (
    EndedAttempt,
    cancelled_after_all,
    complain,
    continue_in_another_job,
    latest,
    reason_now,
)
from hpcrun.job.policy import Decision
from hpcrun.job.requeue import requeue
from hpcrun.job.retries import Clock
from hpcrun.run.directory import RunDirectory
from hpcrun.run.events import Attempt, Cause, Event, note, read_events


def start_pack_again(runs: Sequence[RunDirectory], attempt: Attempt, end_time: float | None) -> int:
    """Requeue the job that ``runs`` share and that must continue; return the batch script's exit code.

    Args:
        end_time: of the job, in Unix seconds; None without a limit.
    """
    clock = Clock()
    ended = {run: _recorded_end(run, attempt) for run in runs}

    def failed(kind: str, words: str) -> None:
        for run in runs:
            note(run, "requeue-failed", attempt, cause=kind, reason=words)
        complain(f"not requeued yet: {words}")

    # A person may have cancelled one of the runs after its end.
    left = [run for run in runs if reason_now(run, attempt, None) != "cancelled"] or runs
    for run in set(runs).difference(left):
        cancelled_after_all(run, attempt, ended[run])
    runs, until = left, latest(end_time, clock)

    def asked() -> str | None:
        found = {reason_now(run, attempt, None) for run in runs}
        return found.pop() if len(found) == 1 else None

    became = requeue(attempt, failed, asked, until=until, clock=clock)
    if became == "cancelled":
        return max(cancelled_after_all(run, attempt, ended[run]) for run in runs)
    if became == "forbidden":
        return max(
            continue_in_another_job(run, attempt, ended[run], False, until, clock) for run in runs
        )
    if became != "requeued":
        return exitcodes.UNFINISHED
    _exclude_bad_nodes(attempt, {run: ended[run] for run in runs})
    return exitcodes.DONE


def _recorded_end(run: RunDirectory, attempt: Attempt) -> EndedAttempt | None:
    """Return the end that the batch step of ``run`` has recorded; None if there is no readable record."""
    try:
        events = [one for one in read_events(run) if (one.what, one.attempt) == ("ended", attempt)]
        if not events:
            return None
        return EndedAttempt(_classification(events[-1]), load_resolved(run.config), None)
    except (OSError, UserError, ValueError) as error:
        complain(f"{run.name}: its recorded end cannot be read: {error}")
        return None


def _classification(ended: Event) -> Classification:
    fields = ended.fields
    return Classification(
        Cause(ended.cause),
        ended.step,
        str(fields.get("reason") or ""),
        Decision(bool(fields.get("restart_allowed")), str(fields.get("decision") or "")),
        None,
        bool(fields.get("elsewhere")),
        fields.get("host"),
    )


def _exclude_bad_nodes(
    attempt: Attempt, classified: Mapping[RunDirectory, EndedAttempt | None]
) -> None:
    """Exclude bad nodes from the waiting job, once for all of its runs."""
    ends = {run: end for run, end in classified.items() if end is not None}
    if not ends:
        return
    job = next(iter(ends.values())).job
    classifications = [end.classification for end in ends.values()]
    exclude_bad_nodes(
        [*ends], attempt, classifications, after=job.exclude_after, hours=job.exclude_hours
    )
