"""Retries of a request to Slurm: the pauses, the reports, and the last try."""

import time
from collections.abc import Callable
from dataclasses import dataclass

# Tries after a refusal in unknown words.
_UNKNOWN = 5
# Seconds.
_FIRST_PAUSE, _LONGEST_PAUSE = 5.0, 30.0
_SAY_EVERY = 300.0


@dataclass(frozen=True)
class Clock:
    """The clock and its sleep function; tests replace them."""

    now: Callable[[], float] = time.time
    sleep: Callable[[float], None] = time.sleep


class Retries:
    """The tries of one request.

    Args:
        failed: called with the kind of a failure (see ``classify_requeue_error``) and Slurm's message;
            at most every five minutes while the controller does not answer.
        until: retry a controller that does not answer until then (Unix seconds); None: one try.
        clock: the time.
    """

    def __init__(
        self, failed: Callable[[str, str], None], until: float | None, clock: Clock
    ) -> None:
        self._failed, self._until, self._clock = failed, until or 0.0, clock
        self._pause, self._unknown, self._said = _FIRST_PAUSE, 0, float("-inf")

    def report(self, kind: str, words: str) -> None:
        """Call ``failed``, unless a missing answer was reported less than five minutes ago."""
        now = self._clock.now()
        if kind != "transient" or now - self._said >= _SAY_EVERY:
            self._failed(kind, words)
            self._said = now

    def again(self, kind: str, words: str) -> bool:
        """Report the failure and wait for the next try; return False, without a wait, after the last."""
        self.report(kind, words)
        if kind == "transient":
            if self._clock.now() >= self._until:
                return False
        else:
            self._unknown += 1
            if self._unknown >= _UNKNOWN:
                return False
        self._clock.sleep(self._pause)
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        return True
