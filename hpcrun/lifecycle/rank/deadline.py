"""The job's end time, watched by a thread during the training."""

import threading
import time
from collections.abc import Callable


class DeadlineWatch:
    """Reports when to stop: ``lead`` seconds before the job's end.

    Limits are extended while jobs run, so the thread asks for the end every ``refresh`` seconds and, close
    to the time to stop, after half of the remaining time, so that no extension is missed.
    It is a thread because the scheduler may answer late. Only rank 0 watches; the other ranks learn of it by
    agreement.

    Slurm does not count the time in which a job is suspended, but the clock does. So an old answer
    is ignored once the thread has missed its time to ask.
    """

    _shortest = 2.0
    _late = 15.0
    """Seconds; an answer never takes this long."""

    def __init__(
        self, end_time: Callable[[], float | None], lead: float, refresh: float = 300.0
    ) -> None:
        """Start the thread; ``end_time`` returns Unix seconds, or None if the job has no limit."""
        self._ask, self._lead, self._refresh = end_time, lead, refresh
        self._end = end_time()
        self._next = time.time() + self._pause()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="deadline", daemon=True)
        self._thread.start()

    def due(self) -> bool:
        """Return True if the job must stop now."""
        now = time.time()
        if self._end is None or now < self._end - self._lead:
            return False
        return now < self._next + self._late or not self._thread.is_alive()

    def close(self) -> None:
        """Stop asking."""
        self._stop.set()

    def _watch(self) -> None:
        while not self._stop.wait(self._pause()):
            began = time.time()
            found = self._ask()
            if found is None and time.time() - began > self._late:
                # The process was suspended during the question, so no answer came.
                found = self._ask()
            self._end = found or self._end
            self._next = time.time() + self._pause()

    def _pause(self) -> float:
        if self._end is None:
            return self._refresh
        left = self._end - self._lead - time.time()
        return min(self._refresh, max(left / 2, self._shortest))
