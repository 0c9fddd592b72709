"""The job's end time, watched by a thread during the training.

The end moves: an administrator extends a limit, or a preemption brings it forward to the end of the
grace period. So callers ask the controller again from time to time with ``query_end_time``.
"""

import re
import threading
import time
from collections.abc import Callable, Mapping

from hpcrun import slurm
from hpcrun.errors import ClusterError
from hpcrun.slurm.placement import in_local_cluster, job_id

_LATE = 15.0
"""Seconds; an answer never takes this long."""


class DeadlineWatch:
    """The job's end, as the scheduler has last answered; a thread asks, because an answer may be late.

    Limits are extended while jobs run, so the scheduler is asked every ``refresh`` seconds and, close to the
    time to stop, after half of the remaining time, so that no extension is missed. Slurm does not count the
    time in which a job is suspended, but the clock does. So an old answer is ignored once the time to ask has
    been missed. Only rank 0 watches; the other ranks learn of the end by agreement.
    """

    def __init__(
        self,
        end_time: Callable[[], float | None],
        lead: float,
        refresh: float = 300.0,
        *,
        given: float | None = None,
        shortest: float = 2.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Ask for the first time; :meth:`start` starts the thread.

        Args:
            end_time: returns the end in Unix seconds; None without an answer, or if the job has no limit.
            lead: seconds before the end at which to stop.
            refresh: maximum seconds between two questions.
            given: the end until the first answer.
            shortest: minimum seconds between two questions.
            clock: returns the time in Unix seconds.
        """
        self._end_time, self._lead, self._refresh = end_time, lead, refresh
        self._shortest, self._clock = shortest, clock
        found = end_time()
        self._end = given if found is None else found
        self._next = clock() + self.pause()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="deadline", daemon=True)

    def start(self) -> "DeadlineWatch":
        """Ask from a thread until :meth:`close`; return this watch."""
        self._thread.start()
        return self

    def pause(self) -> float:
        """Return the seconds until the next question."""
        if self._end is None:
            return self._refresh
        left = self._end - self._lead - self._clock()
        return min(self._refresh, max(left / 2, self._shortest))

    def ask(self) -> None:
        """Ask the scheduler again."""
        began = self._clock()
        found = self._end_time()
        if found is None and self._clock() - began > _LATE:
            # The process was suspended during the question, so no answer came.
            found = self._end_time()
        self._end = found or self._end
        self._next = self._clock() + self.pause()

    def due(self) -> bool:
        """Return True if the job must stop now."""
        now = self._clock()
        if self._end is None or now < self._end - self._lead:
            return False
        return now < self._next + _LATE or not self._thread.is_alive()

    def close(self) -> None:
        """Stop asking."""
        self._stop.set()

    def _watch(self) -> None:
        while not self._stop.wait(self.pause()):
            self.ask()


_SECONDS = re.compile(r"[0-9]+(?:\.[0-9]+)?")


def query_end_time(job: str) -> float | None:
    """Ask the controller for the job's end in Unix seconds. It may take 10 s: not within a step.

    Returns None if the job has no time limit, is unknown, or the controller does not answer: the
    rank then continues with the previous answer.
    """
    answer = slurm.run(slurm.squeue_command([job]))
    info = slurm.parse_squeue(answer.stdout).get(job)
    return None if info is None or info.state == "PENDING" else info.end_time


def asked_end(
    environ: Mapping[str, str], query: Callable[[str], float | None] = query_end_time
) -> float | None:
    """Return the controller's answer about this process's job, in Unix seconds; None as ``query``.

    Args:
        environ: the environment of this rank.
        query: returns the end for a job's id; tests replace it.
    """
    job = job_id(environ)
    return None if job is None or in_local_cluster(environ) else query(job)


def given_end(environ: Mapping[str, str]) -> float | None:
    """Return SLURM_JOB_END_TIME, set since Slurm 23.02 and in the local cluster; None without it.

    It does not follow an extended limit, so it counts only until the controller has answered once.

    Raises:
        ClusterError: it is not a number.
    """
    given = environ.get("SLURM_JOB_END_TIME", "").strip()
    if given and not _SECONDS.fullmatch(given):
        raise ClusterError(f"SLURM_JOB_END_TIME is {given!r}: expected Unix seconds; unset it")
    return float(given) if given else None
