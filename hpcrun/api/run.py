"""A run as an object: its state, its results, its logs, and methods to end and to continue it."""

import functools
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypedDict, TypeVar

from hpcrun.api.cancellation import wait_for_ends
from hpcrun.api.logs import log_name, require_log
from hpcrun.api.places import handle
from hpcrun.api.run_status import RunRow, row_of
from hpcrun.api.submission.choose_config import SubmitRequest
from hpcrun.api.submission.plan import SubmissionPlan, plan_resume
from hpcrun.errors import UserError
from hpcrun.printing import logged
from hpcrun.run.directory import RunDirectory
from hpcrun.run.files import open_regular, read_json, read_lines
from hpcrun.run.journal.events import Pruned
from hpcrun.run.journal.journal import Journal
from hpcrun.slurm.launch import jobs, stopping
from hpcrun.storage.store import CheckpointStore

_P = ParamSpec("_P")
_T = TypeVar("_T")


def refusing(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Let ``function`` raise UserError instead of OSError."""

    @functools.wraps(function)
    def guarded(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return function(*args, **kwargs)
        except TimeoutError:
            raise
        except OSError as error:
            place = f"{error.filename}: " if error.filename else ""
            raise UserError(
                f"{place}{error.strerror or error}; check its owner and the free space"
            ) from error

    return guarded


_LOOK = 0.5


class CheckpointFacts(TypedDict):
    """A committed checkpoint. ``created``: Unix seconds; ``world_size``: the ranks that wrote it."""

    step: int
    path: str
    bytes: int
    created: float
    world_size: int


class Run:
    """A run directory and the job that runs it.

    :func:`hpcrun.submit` and :func:`hpcrun.open` return such objects. An object contains a path and nothing
    else: each method reads the files again, and asks the scheduler where the answer depends on the job.
    """

    def __init__(self, directory: RunDirectory) -> None:
        """Keep ``directory``; :func:`hpcrun.open` checks it first."""
        self._directory = directory

    @property
    def path(self) -> Path:
        """The absolute path of the run directory."""
        return self._directory.path

    @property
    def name(self) -> str:
        """The name of the run, which is the name of its folder."""
        return self._directory.name

    def __repr__(self) -> str:
        return f"<hpcrun.{type(self).__name__} {str(self.path)!r}>"

    def __fspath__(self) -> str:
        return str(self.path)

    @refusing
    def status(self) -> RunRow:
        """Return the facts that ``hpcrun status --json`` prints.

        Returns:
            Among other keys: ``state`` (new, pending, running, suspended, finished, cancelled, pruned,
            stopped, failed or lost), ``step`` (finished steps), ``committed`` (the step of a resume),
            ``loss``, ``job``, ``executor``, ``attempts``, ``age_seconds``, ``progress_seconds`` (age of the
            newest metrics), ``goodput`` (seconds by kind), ``detail`` and ``diagnosis`` (the cause of a
            failure). An unknown value is None.

        Raises:
            UserError: the run directory cannot be read.
        """
        return row_of(self._directory, jobs.state(self._directory))

    @refusing
    def wait(self, timeout: float | None = None) -> str:
        """Wait until no job has the run, restarts included; return the state, such as ``finished``.

        Args:
            timeout: the longest wait in seconds; None: no limit.

        Raises:
            TimeoutError: the job has not ended after ``timeout`` seconds, and continues.
            UserError: the run directory cannot be read.
        """
        limit = float("inf") if timeout is None else float(timeout)
        if not jobs.wait_until_ended(self._directory, limit):
            raise TimeoutError(f"{self.name}: has not ended after {limit:g} s; the job continues")
        return jobs.state(self._directory).word

    @refusing
    def result(self) -> dict[str, Any]:
        """Return ``result.json``: ``state``, and the measured values or the reason of the end.

        Raises:
            UserError: the run has no result yet.
        """
        result = read_json(self._directory.result)
        if result is None:
            word = jobs.state(self._directory).word
            raise UserError(f"{self.name}: has no result ({word}); wait for its end with wait()")
        return result

    @refusing
    def metrics(self, *, since: int | None = None) -> list[dict[str, Any]]:
        """Return the lines of ``metrics.jsonl`` in the order of writing, a dict for each logged step.

        A step that was computed again after a restart has a line for each time; ``restart`` distinguishes
        the lines. A number that is not finite is None. Times are in seconds. ``pandas.DataFrame(lines)`` is a
        frame of the lines.

        Args:
            since: only the lines of later steps.

        Raises:
            UserError: the file cannot be read.
        """
        lines = read_lines(self._directory.metrics)
        if since is not None:
            lines = [line for line in lines if isinstance(line.get("step"), int)]
            lines = [line for line in lines if line["step"] > since]
        return lines

    @refusing
    def logs(self, rank: int = 0) -> str:
        """Return the log of a rank in the newest attempt, with control characters as escapes.

        Args:
            rank: the number of the rank; with a launcher such as torchrun, that of the node.

        Raises:
            UserError: ``rank`` is not a number of a rank, or the rank has no log.
        """
        if isinstance(rank, bool) or not isinstance(rank, int) or rank < 0:
            raise UserError(f"rank={rank!r}: give the number of a rank")
        folder = require_log(self._directory, rank, "rank=")
        # The line break at the end of a file begins no further line.
        with open_regular(folder / log_name(rank)) as stream:
            raw = stream.read().removesuffix(b"\n")
        return "".join(f"{logged(line)}\n" for line in (raw.split(b"\n") if raw else ()))

    @refusing
    def checkpoints(self) -> list[CheckpointFacts]:
        """Return the committed checkpoints, newest first, without those with a file of a wrong size.

        Each is a dict: ``step``, ``path`` (of the folder), ``bytes``, ``created`` (Unix seconds) and
        ``world_size`` (ranks that wrote it). ``hpcrun verify`` reads and compares every byte.

        Raises:
            UserError: the folder of the checkpoints cannot be read.
        """
        store = CheckpointStore(self._directory.checkpoints, "open-0")
        return [
            {
                "step": step,
                "path": str(store.path(step)),
                "bytes": manifest.size,
                "created": manifest.created,
                "world_size": manifest.world_size,
            }
            for step, manifest in store.valid().items()
        ]

    @refusing
    def cancel(self, *, now: bool = False, wait: bool = True, prune: bool = False) -> None:
        """End the job: the ranks save a checkpoint and stop. :meth:`resume` continues the run.

        Args:
            now: kill the ranks, without a checkpoint.
            wait: return after the end of the job.
            prune: a search ends the run, so its state becomes ``pruned``, not ``cancelled``.

        Raises:
            UserError: no job has the run, the scheduler refuses, or the job has not ended after its
                grace time and a minute.
        """
        if prune and jobs.state(self._directory).live:
            # First: if this process is killed now, the search knows that the job has to end.
            Journal(self._directory).append(Pruned())
        (stopping.kill if now else stopping.cancel)(self._directory)
        if wait and wait_for_ends([self._directory]):
            status = f"`hpcrun status {handle(self._directory)}`"
            raise UserError(f"{self.name}: the job has not ended; see {status}")

    @refusing
    def preempt(self) -> None:
        """Send the job the signal of a preemption: the ranks get the warning signal, and the job is requeued.

        Raises:
            UserError: no job has the run, the job waits for its start, or the scheduler refuses.

        Sources: ``PreemptMode=REQUEUE`` in slurm.conf(5), and ``--signal`` in sbatch(1).
        """
        stopping.preempt(self._directory)

    @refusing
    def resume(self, *, snapshot: bool | None = None) -> "Run":
        """Submit the run again, from its newest checkpoint, as it was submitted; return this object.

        A finished run stays as it is. With the executor ``debug`` the call returns after the training.

        Args:
            snapshot: run a copy of the code; None: as in the previous submission.

        Raises:
            UserError: a job has the run already, or the run cannot be submitted.
        """
        request = SubmitRequest(runs=self.path.parent, snapshot=snapshot)
        carry_out(plan_resume(self._directory, request))
        return self


@refusing
def wait_any(runs: Iterable[Run], timeout: float | None = None) -> list[Run]:
    """Wait until a job of ``runs`` has ended, restarts included; return the runs without a job.

    The scheduler is asked once for all runs. Without runs the list is empty.

    Args:
        runs: runs of any sweep, or of none.
        timeout: the longest wait in seconds; None: no limit.

    Raises:
        TimeoutError: no job has ended after ``timeout`` seconds; all continue.
        UserError: a run directory cannot be read.
    """
    found = {RunDirectory(run.path): run for run in runs}
    return [found[run] for run in wait_until([*found], min(1, len(found)), timeout, "wait_any")]


def wait_until(
    runs: Sequence[RunDirectory], count: int, timeout: float | None, name: str
) -> list[RunDirectory]:
    """Wait until ``count`` of ``runs`` have no job, with one query of the scheduler for all; return these.

    Raises:
        TimeoutError: with ``name``, after ``timeout`` seconds.
    """
    deadline = float("inf") if timeout is None else time.monotonic() + float(timeout)
    live, pause = [*runs], None
    while True:
        states = jobs.states(live)
        live = [run for run, now in zip(live, states, strict=True) if now.live]
        if len(runs) - len(live) >= count:
            return [run for run in runs if run not in live]
        if (left := deadline - time.monotonic()) <= 0:
            words = f"{len(live)} runs have not ended after {timeout:g} s; they continue"
            raise TimeoutError(f"{name}: {words}")
        pause = pause or jobs.pauses(states[0].executor, _LOOK)
        time.sleep(min(next(pause), left))


def carry_out(plan: SubmissionPlan) -> None:
    """Submit the run of ``plan``, unless it is finished; train it here if the executor is ``debug``."""
    from hpcrun.api.submission.handover import submit_run

    if plan.finished is None and submit_run(plan) is None:
        from hpcrun.api.submission.here import run_here

        run_here(plan.run)
