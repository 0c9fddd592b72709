"""All known facts about an attempt's end, as lines: records, logs, Slurm's messages."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from hpcrun import slurm
from hpcrun.diagnose.causes import signal_name
from hpcrun.diagnose.read_log import LogLine, read_log
from hpcrun.run.attempt import Attempt
from hpcrun.run.directory import RunDirectory
from hpcrun.run.endings import read_exits, read_failures, read_hang
from hpcrun.run.journal.events import (
    AttemptRefused,
    CancelRequested,
    Cause,
    Ended,
    Submitted,
    Unknown,
)
from hpcrun.run.journal.state import State

LOGS = ("*.log", "*.out", "*.err", "*.txt")
"""The name patterns of log files."""

_PATIENCE = 20.0
_ENDED_WELL = ("COMPLETED", "RUNNING", "PENDING", "COMPLETING", "REQUEUED")


def read_whole(path: Path, shown: str) -> Iterator[LogLine]:
    """Yield the lines of a log as :func:`hpcrun.diagnose.read_log.read_log`; raises OSError."""
    return read_log(path, shown=shown)


def lines_of_attempt(
    run: RunDirectory,
    attempt: Attempt,
    state: State,
    *,
    accounting: Sequence[slurm.JobRecord] = (),
    most_files: int | None = None,
    read: Callable[[Path, str], Iterable[LogLine]] = read_whole,
) -> Iterator[LogLine]:
    """Yield the lines of ``attempt``: records with a time first, then the logs.

    Args:
        state: the state of the run; an empty one: nothing is known about the end.
        accounting: sacct's records of the job.
        most_files: maximum number of logs to read; None: all.
        read: returns the lines of a log; its second argument is the name that they show.

    Raises:
        OSError: a log cannot be read.
    """
    folder = run.attempt_logs(attempt)
    yield from _records(run, folder)
    logs = sorted(path for pattern in LOGS for path in folder.glob(pattern))
    for path in logs[:most_files]:
        yield from read(path, _shown(run, path))
    batch = run.batch_log(attempt.job)
    if batch.is_file():
        found = read(batch, _shown(run, batch))
        mine = (line for line in found if not names_another_run(run, line.text))
        yield from _of_attempt(mine, attempt)
    for event in state.of_kind(Ended):
        if event.attempt == attempt and event.cause != Cause.FINISHED.value:
            reason = (event.reason or "").removeprefix(f"{event.cause}: ")
            text = f"hpcrun: the attempt ended: {event.cause}: {reason}"
            yield LogLine(text, "events.jsonl", node=event.host, time=event.time, failure=True)
    for record in accounting:
        if record.state not in _ENDED_WELL:
            text = (
                f"sacct: job {record.job_id} ended as {record.state}, exit code {record.exit_code}"
            )
            node = record.nodes[0] if len(record.nodes) == 1 else None
            yield LogLine(text, "sacct", node=node, time=record.end)


def attempt_to_diagnose(state: State) -> Attempt | None:
    """Return the newest attempt that has begun, or None.

    An attempt that the restart policy refused has no cause: the attempt before has the cause.
    """
    refused = {
        event.attempt
        for event in state.of_kind(AttemptRefused, Ended)
        if isinstance(event, AttemptRefused) or event.cause == Cause.EXHAUSTED.value
    }
    # A job may be cancelled while it waits: the attempt before has the cause.
    before = (Submitted, CancelRequested, Unknown)
    begun = [one.attempt for one in state.events if one.attempt and not isinstance(one, before)]
    allowed = [attempt for attempt in begun if attempt not in refused]
    newest = allowed or begun
    return newest[-1] if newest else None


def names_another_run(run: RunDirectory, line: str) -> bool:
    """Return whether a line in the log of a job reports on another run of the sweep that shares the job."""
    sweep, shared, _ = run.name.rpartition("/")
    return bool(shared) and (
        line.startswith(f"hpcrun: {sweep}/") and not line.startswith(f"hpcrun: {run.name}: ")
    )


def accounting_of(job: str) -> list[slurm.JobRecord]:
    """Return sacct's records of ``job``, oldest attempt first; empty without accounting."""
    if not job.replace("_", "").isdecimal():
        return []
    answer = slurm.run(slurm.sacct_command([job]), timeout=_PATIENCE)
    return slurm.parse_sacct(answer.stdout) if answer.returncode == 0 else []


def _shown(run: RunDirectory, path: Path) -> str:
    return str(path.relative_to(run.path))


def _records(run: RunDirectory, folder: Path) -> Iterator[LogLine]:
    """Return the records of the ranks, their watchers and the watchdogs: each with a time."""
    found = []
    for failure in read_failures(folder):
        where = f" at {failure.where}" if failure.where else ""
        path = _shown(run, folder / f"failure-rank-{failure.rank:05d}.json")
        for number, text in enumerate(failure.message.splitlines() or [""]):
            reported = f"{failure.kind}: {text}{where}" if number == 0 else text
            first = number == 0
            line = LogLine(reported, path, 0, failure.rank, failure.host, failure.time, first)
            found.append(replace(line, frames=failure.traceback))
    for ended in read_exits(folder):
        if ended.signal is not None and not ended.induced:
            text = f"rank {ended.rank} was killed by {signal_name(ended.signal)}"
            path = _shown(run, folder / "exits.jsonl")
            found.append(LogLine(text, path, 0, ended.rank, ended.host, ended.time, True))
    hang = read_hang(folder)
    if hang is not None:
        text = f"hpcrun: no progress: {hang.line}"
        found.append(
            LogLine(text, _shown(run, folder / "hang.json"), 0, hang.rank, hang.host, hang.time)
        )
    yield from sorted(found, key=lambda line: line.time or 0.0)


def _of_attempt(lines: Iterable[LogLine], attempt: Attempt) -> Iterator[LogLine]:
    """Return the lines of the batch log between the mark of ``attempt`` and the next; all without marks."""
    mine, marked = True, f"hpcrun: attempt {attempt.owner} "
    other = f"hpcrun: attempt {attempt.job}-"
    for line in lines:
        if line.text.startswith(marked):
            mine = True
        elif line.text.startswith(other):
            mine = False
        elif mine:
            yield line
