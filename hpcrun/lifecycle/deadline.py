"""The job's real end time, watched beside the training."""

import threading
import time
from collections.abc import Callable


class DeadlineWatch:
    """Says when it is time to stop: ``lead`` seconds before the job's end.

    Limits are extended while jobs run, so the end is asked for again every ``refresh`` seconds, in a
    thread: the scheduler may take its time to answer. Only rank 0 watches; the others hear of it by
    agreement.
    """

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
        while not self._stop.wait(self._refresh):
            self._end = self._ask() or self._end
