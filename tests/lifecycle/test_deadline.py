"""The watch on the job's end, with a scheduler that changes the end, on a simulated clock."""

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from hpcrun.lifecycle.rank import deadline
from hpcrun.lifecycle.rank.deadline import DeadlineWatch


class Clock:
    """A clock that advances only in the pauses of the watch; each pause waits for ``tick``."""

    def __init__(self) -> None:
        self.now = 1_000_000.0
        self._watch: DeadlineWatch | None = None

    def time(self) -> float:
        return self.now

    def start(self, end_time: Callable[[], float | None], **options: float) -> DeadlineWatch:
        """Return a watch without its thread; `tick` does the thread's work."""
        self._watch = DeadlineWatch(end_time, **options)
        self._watch.close()
        self._watch._thread.join()
        return self._watch

    def tick(self) -> None:
        """Let one pause of the watch pass, and run its next check."""
        assert self._watch is not None
        pauses: Iterator[bool] = iter((False, True))

        def wait(seconds: float) -> bool:
            over = next(pauses)
            self.now += 0.0 if over else seconds
            return over

        self._watch._stop.wait = wait  # type: ignore[method-assign,assignment]
        self._watch._watch()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(deadline, "time", clock)
    return clock


def test_an_extension_that_comes_shortly_before_the_stop_is_heard(clock: Clock) -> None:
    ends = [clock.now + 3600.0]
    watch = clock.start(lambda: ends[0], lead=10.0, refresh=300.0)
    while clock.now < ends[0] - 10.0 - 5.0:
        clock.tick()
        assert not watch.due()
    ends[0] += 3600.0
    clock.tick()
    clock.now = ends[0] - 3600.0
    assert not watch.due()


def test_it_is_due_a_lead_before_the_end_and_a_scheduler_that_is_silent_changes_nothing(
    clock: Clock,
) -> None:
    end = clock.now + 20.0
    answers: list[float | None] = [end]
    watch = clock.start(lambda: answers.pop() if answers else None, lead=5.0, refresh=300.0)
    while clock.now < end - 5.0:
        assert not watch.due()
        clock.tick()
    assert watch.due()


def test_a_job_without_a_limit_is_never_due(clock: Clock) -> None:
    watch = clock.start(lambda: None, lead=5.0)
    assert not watch.due()
    clock.tick()
    assert clock.now == 1_000_300.0
    assert not watch.due()


def test_its_thread_asks_by_itself_until_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeadlineWatch, "_shortest", 0.001)
    asked, enough = [0], threading.Event()

    def end_time() -> float:
        asked[0] += 1
        if asked[0] == 3:
            enough.set()
        return 0.0

    watch = DeadlineWatch(end_time, lead=0.0)
    assert enough.wait(60)
    watch.close()
    watch._thread.join()


def test_after_a_suspension_an_old_end_is_not_believed_until_slurm_was_asked_again(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    monkeypatch.setattr(DeadlineWatch, "_shortest", 0.001)
    ends, asking, answer = [clock.now + 60.0], threading.Event(), threading.Event()

    def end_time() -> float:
        if asking.is_set():
            assert answer.wait(60)
        return ends[0]

    watch = DeadlineWatch(end_time, lead=10.0, refresh=0.001)
    try:
        asking.set()
        # Suspended beyond the known end.
        clock.now += 600.0
        assert not watch.due()
        ends[0] += 600.0
        answer.set()
        wait_until(lambda: watch._end == ends[0] and not watch.due())
        clock.now = ends[0] - 10.0
        wait_until(watch.due)
    finally:
        answer.set()
        watch.close()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
