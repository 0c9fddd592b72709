"""The logs of the ranks of a run's newest attempt."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from hpcrun.errors import UserError
from hpcrun.printing import logged
from hpcrun.run.directory import RunDirectory
from hpcrun.run.events import Attempt, Event, read_events
from hpcrun.run.io.files import read_json
from hpcrun.slurm.launch import jobs


def last_attempt(run: RunDirectory) -> Attempt | None:
    """Return the newest attempt of the run that has begun, or None."""
    return newest_attempt(read_events(run))


def newest_attempt(events: Sequence[Event]) -> Attempt | None:
    """Return the newest attempt in ``events`` that has begun, or None."""
    for event in reversed(events):
        if event.attempt is not None and event.what != "submitted":
            return event.attempt
    return None


def last_attempt_logs(run: RunDirectory) -> Path | None:
    """Return the log folder of the newest attempt, or None before the first."""
    attempt = last_attempt(run)
    return None if attempt is None else run.attempt_logs(attempt.job, attempt.restart)


def require_log(run: RunDirectory, rank: int | None, option: str = "--rank ") -> Path:
    """Return the folder that holds the log of ``rank``, or with None the log of any rank.

    Args:
        option: the words before a rank in a message.

    Raises:
        UserError: there is no such log.
    """
    folder = last_attempt_logs(run)
    if folder is None:
        raise UserError(f"{run.name}: has no log yet ({jobs.state(run).word}); look again later")
    ranks = len(list(folder.glob("rank-*.log")))
    if not ranks:
        why = (read_json(run.result) or {}).get("reason")
        told = f"no rank has written a log: {why}" if why else "no rank has written a log"
        raise UserError(f"{folder}: {told}; see the other logs in {run.logs}")
    if rank is not None and not (folder / log_name(rank)).exists():
        raise UserError(f"{option}{rank}: {run.name} has logs of {up_to(ranks)} in {folder}")
    return folder


def up_to(ranks: int) -> str:
    """Return the words for the numbers of ``ranks`` ranks."""
    return f"ranks 0 to {ranks - 1}" if ranks > 1 else "rank 0 only"


def log_name(rank: int) -> str:
    """Return the name of the log of ``rank``."""
    return f"rank-{rank:05d}.log"


def log_files(folder: Path, rank: int | None) -> list[Path]:
    """Return the log of ``rank`` in ``folder``, or with None the logs of all ranks."""
    return sorted(folder.glob("rank-*.log" if rank is None else log_name(rank)))


def marked(path: Path, lines: Iterator[bytes], rank: int | None) -> Iterator[str]:
    """Yield ``lines`` of the log ``path`` as they are shown; of all ranks (None) with the rank's mark."""
    for line in lines:
        yield f"{path.stem}: {logged(line)}" if rank is None else logged(line)
