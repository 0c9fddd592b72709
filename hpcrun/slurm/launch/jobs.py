"""A run's job on any executor, and its state."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hpcrun import slurm
from hpcrun.run.directory import RunDirectory
from hpcrun.run.files import read_json
from hpcrun.run.journal.events import Ended, Excluded, GivenUp, RequeueFailed, Submitted, Unknown
from hpcrun.run.journal.journal import Reader, read_state
from hpcrun.run.journal.state import State
from hpcrun.slurm.answers import WAITING, is_over
from hpcrun.slurm.launch import submission as without_scheduler
from hpcrun.slurm.launch.slurm_jobs import PATIENCE, SlurmAnswer, slurm_states
from hpcrun.slurm.local import job_files

_SUSPENDED = "SUSPENDED"
_SUSPENDED_WORDS = (
    "suspended by Slurm for another job, or by an administrator: it keeps its state in memory and continues "
    "when Slurm resumes it; `hpcrun cancel` ends it"
)
_LOOK = 0.2

_GONE = (
    "its controller is gone (killed, or the machine went down); `hpcrun resume` continues the run"
)
_UNWRITTEN = (
    "its ranks have ended, and their end is not written yet; if it stays so, the disk is full or read-only: "
    "free some space there, and the run continues"
)


@dataclass(frozen=True)
class RunState:
    """The state of a run. ``word`` is one of new, pending, running, suspended, finished, cancelled, stopped,
    failed, lost.

    ``detail``: more in plain words; ``live``: a job has the run now. ``cluster``: the cluster of the job, if
    it is not this host's: two clusters may use the same number for two jobs. ``starts``: the expected start
    of a waiting job, in Unix seconds. ``asked``: Slurm has answered.
    """

    word: str
    detail: str
    live: bool
    executor: str | None
    job: str | None
    cluster: str | None = None
    starts: float | None = None
    asked: bool = True


def current_job(run: RunDirectory, read: Reader = read_state) -> tuple[str, str] | None:
    """Return the (executor, job id) to which the run was last submitted, or None; see ``State.job``."""
    return read(run).job


def states(
    runs: Iterable[RunDirectory],
    read: Reader = read_state,
    known: Callable[[RunDirectory], bool] | None = None,
) -> list[RunState]:
    """Return the state of each run, with one squeue, and at most one sacct.

    Args:
        read: returns the state of a run by its journal.
        known: returns True if the files show that the run has ended; Slurm is not asked about its job.
    """
    jobs = [(run, current_job(run, read)) for run in runs]
    asked = [
        (run, job)
        for run, (executor, job) in _given(jobs)
        if executor == "slurm" and not (known and known(run))
    ]
    clusters = {run: read(run).cluster_of(job) for run, job in asked}
    here = slurm.cluster_name(PATIENCE) if any(clusters.values()) else None
    # Without an answer it is unknown which jobs are on other clusters.
    others = {run: name for run, name in clusters.items() if name and here not in (None, name)}
    answer = slurm_states([pair for pair in asked if pair[0] not in others], read)
    return [
        _elsewhere(run, job, others[run], read)
        if job is not None and run in others
        else _state(run, job, answer, read)
        for run, job in jobs
    ]


def _elsewhere(run: RunDirectory, job: tuple[str, str], cluster: str, read: Reader) -> RunState:
    """Return the state of a run with a job on another cluster, as far as its files show."""
    ended = _by_result(read_json(run.result), *job)
    if ended is not None:
        return ended
    state = read(run)
    if state.was_cancelled(job[1]):
        return RunState("cancelled", "cancelled; `hpcrun resume` continues it", False, *job)
    return RunState(_by_events(state), f"on cluster {cluster}; ask there", True, *job, cluster)


def _given(
    jobs: Iterable[tuple[RunDirectory, tuple[str, str] | None]],
) -> Iterator[tuple[RunDirectory, tuple[str, str]]]:
    return ((run, job) for run, job in jobs if job is not None)


def state(run: RunDirectory) -> RunState:
    """Return the state of one run."""
    return states([run])[0]


def wait_until_ended(run: RunDirectory, timeout: float) -> bool:
    """Wait until no job has the run; return whether that happened within ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    executor, _ = current_job(run) or (None, "")
    pause = pauses(executor, _LOOK)
    while state(run).live:
        left = deadline - time.monotonic()
        if left < 0:
            return False
        time.sleep(min(next(pause), max(left, _LOOK)))
    return True


def _state(
    run: RunDirectory,
    job: tuple[str, str] | None,
    slurm_knows: SlurmAnswer,
    read: Reader,
) -> RunState:
    result = read_json(run.result)
    if job is None:
        return _by_result(result, None, None) or RunState("new", "not submitted", False, None, None)
    executor, job_id = job
    if executor == "local":
        word, detail = _local_state(run.job_logs(job_id))
    elif executor == "debug":
        # A program that submitted from Python continues after the training.
        here = result is None and _is_process(job_id)
        word, detail = ("RUNNING", "in its own terminal") if here else ("", "")
    elif executor == "direct":
        word, detail = without_scheduler.process_state(run, read)
    else:
        word, detail = slurm_knows.known.get(job_id, ("", ""))
    ended = _by_result(result, executor, job_id)
    if word and not is_over(word):
        shown = "pending" if word in WAITING else "running"
        if word == _SUSPENDED:
            shown, detail = "suspended", _SUSPENDED_WORDS
        starts = slurm_knows.starts.get(job_id) if executor == "slurm" else None
        return RunState(shown, detail, True, executor, job_id, starts=starts)
    if ended is not None:
        return ended
    if word == "CANCELLED" or (not word and read(run).was_cancelled(job_id)):
        detail = "cancelled; `hpcrun resume` continues it"
        return RunState("cancelled", detail, False, executor, job_id)
    if word == "COMPLETED":
        detail = "its result.json is gone or damaged; `hpcrun resume` writes it again"
        return RunState("lost", detail, False, executor, job_id)
    if executor == "slurm" and not word and not slurm_knows.answered:
        reported = _by_events(read(run))
        return RunState(reported, "Slurm does not answer now", True, executor, job_id, asked=False)
    if word:
        return RunState("failed", f"{word}; `hpcrun resume` continues it", False, executor, job_id)
    if executor == "slurm" and _by_events(read(run)) == "pending":
        gone = "its job left Slurm while it waited; `hpcrun resume` continues it"
        return RunState("cancelled", gone, False, executor, job_id)
    detail = detail or "ended without an exit record; `hpcrun resume` continues it"
    return RunState("lost", detail, False, executor, job_id)


def _is_process(job: str) -> bool:
    """Return True if a job of the debug executor, ``pid1234`` or ``pid1234-2``, still runs here."""
    import psutil

    number, _, _ = job.removeprefix("pid").partition("-")
    try:
        return "hpcrun" in " ".join(psutil.Process(int(number)).cmdline())
    except (psutil.Error, ValueError):
        return False


def _by_events(state: State) -> str:
    """Return pending or running, as far as the run directory shows."""
    # A refusal of another job belongs to no attempt.
    passed = (GivenUp, Unknown)
    signs = [one for one in state.events if one.attempt and not isinstance(one, passed)]
    waits = not signs or isinstance(signs[-1], Submitted | Ended | RequeueFailed | Excluded)
    return "pending" if waits else "running"


def _by_result(
    result: dict[str, object] | None, executor: str | None, job: str | None
) -> RunState | None:
    if result is None:
        return None
    word = str(result.get("state", "failed"))
    return RunState(word, str(result.get("reason", "")), False, executor, job)


def _local_state(folder: Path) -> tuple[str, str]:
    status = job_files.read_status(folder)
    if status is None:
        return "", "its job has no state file; `hpcrun resume` continues it"
    if status.state in job_files.ENDED:
        return status.state, ""
    if not job_files.is_alive(status):
        return "", _GONE
    if status.state == "RUNNING" and not job_files.has_tasks(status):
        return status.state, _UNWRITTEN
    return status.state, f"restart {status.restart}" if status.restart else ""


LONGEST = 60.0
"""Seconds between two questions to Slurm about a job in one state."""

_GROWTH = 1.25


def pauses(executor: str | None, first: float) -> Iterator[float]:
    """Yield the seconds until each next question, without end.

    On Slurm each pause is a quarter longer than the previous pause, up to ``LONGEST``. The state on other
    executors is read from files of the run directory, always after ``first`` seconds.
    """
    while True:
        yield first
        if executor == "slurm":
            first = max(first, min(first * _GROWTH, LONGEST))
