"""The job's real end time, watched beside the training."""

import threading
import time
from collections.abc import Callable


class DeadlineWatch:
    """Says when it is time to stop: ``lead`` seconds before the job's end.

    Limits are extended while jobs run, so the end is asked for again every ``refresh`` seconds and, as
    the time to stop draws near, after half of what is left: an extension is not missed for an old answer.
    In a thread, because the scheduler may take its time. Only rank 0 watches; the others hear of it by
    agreement.
    """

    _shortest = 2.0

    def __init__(
        self, end_time: Callable[[], float | None], lead: float, refresh: float = 300.0
    ) -> None:
        """``end_time``: returns Unix seconds, or None where the job has no limit."""
        self._ask, self._lead, self._refresh = end_time, lead, refresh
        self._end = end_time()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="deadline", daemon=True)
        self._thread.start()

    def due(self) -> bool:
        """Whether the job must stop now."""
        return self._end is not None and time.time() >= self._end - self._lead

    def close(self) -> None:
        """Stop asking."""
        self._stop.set()

    def _watch(self) -> None:
        while not self._stop.wait(self._pause()):
            self._end = self._ask() or self._end

    def _pause(self) -> float:
        if self._end is None:
            return self._refresh
        left = self._end - self._lead - time.time()
        return min(self._refresh, max(left / 2, self._shortest))
