"""The watch on the job's end, with a scheduler that changes the end, on a simulated clock."""

import threading
import time
from collections.abc import Callable

from hpcrun.ranks.deadline import DeadlineWatch


class Clock:
    """A clock that advances only when a test says so."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def time(self) -> float:
        return self.now

    def pass_pause(self, end: DeadlineWatch) -> None:
        """Let the pause before the next question pass, and ask."""
        self.now += end.pause()
        end.ask()


def test_an_extension_that_comes_shortly_before_the_stop_is_heard() -> None:
    clock = Clock()
    ends = [clock.now + 3600.0]
    end = DeadlineWatch(lambda: ends[0], lead=10.0, refresh=300.0, clock=clock.time)
    while clock.now < ends[0] - 10.0 - 5.0:
        clock.pass_pause(end)
        assert not end.due()
    ends[0] += 3600.0
    clock.pass_pause(end)
    clock.now = ends[0] - 3600.0
    assert not end.due()


def test_the_deadline_is_due_a_lead_before_the_end() -> None:
    clock = Clock()
    last = clock.now + 20.0
    answers: list[float | None] = [last]
    end = DeadlineWatch(
        lambda: answers.pop() if answers else None, lead=5.0, refresh=300.0, clock=clock.time
    )
    while clock.now < last - 5.0:
        assert not end.due()
        clock.pass_pause(end)
    assert end.due()


def test_an_extension_outlives_a_controller_without_answers() -> None:
    clock = Clock()
    given = clock.now + 60.0
    answers: list[float | None] = [clock.now + 3600.0, None]
    end = DeadlineWatch(
        lambda: answers.pop() if answers else None, lead=5.0, given=given, clock=clock.time
    )
    clock.now = given - 6.0
    assert not end.due()
    clock.pass_pause(end)
    assert clock.now < given
    clock.pass_pause(end)
    clock.now = given
    assert not end.due()


def test_a_job_without_a_limit_is_never_due() -> None:
    clock = Clock()
    end = DeadlineWatch(lambda: None, lead=5.0, clock=clock.time)
    assert not end.due()
    clock.pass_pause(end)
    assert clock.now == 1_000_300.0
    assert not end.due()


def test_its_thread_asks_by_itself_until_it_is_closed() -> None:
    asked, enough = [0], threading.Event()

    def end_time() -> float:
        asked[0] += 1
        if asked[0] == 3:
            enough.set()
        return 0.0

    before = threading.active_count()
    watch = DeadlineWatch(end_time, lead=0.0, shortest=0.001).start()
    assert enough.wait(60)
    watch.close()
    wait_until(lambda: threading.active_count() == before)


def test_after_a_suspension_slurm_is_asked_for_the_end() -> None:
    clock, asked = Clock(), [0]
    ends, asking, answer = [clock.now + 60.0], threading.Event(), threading.Event()

    def end_time() -> float:
        if asking.is_set():
            assert answer.wait(60)
        asked[0] += 1
        return ends[0]

    watch = DeadlineWatch(
        end_time, lead=10.0, refresh=0.001, shortest=0.001, clock=clock.time
    ).start()
    try:
        asking.set()
        # Suspended beyond the known end.
        clock.now += 600.0
        assert not watch.due()
        ends[0] += 600.0
        answered = asked[0]
        answer.set()
        # A question under way may have read the old end; at the third answer, the new end is stored.
        wait_until(lambda: asked[0] >= answered + 3)
        assert not watch.due()
        clock.now = ends[0] - 10.0
        wait_until(watch.due)
    finally:
        answer.set()
        watch.close()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
