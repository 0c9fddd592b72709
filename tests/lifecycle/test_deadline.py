"""The watch on the job's end, with a scheduler that changes its mind."""

import time

import pytest

from hpcrun.lifecycle.deadline import DeadlineWatch


def test_an_extension_that_comes_shortly_before_the_stop_is_heard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(DeadlineWatch, "_shortest", 0.05)
    begun = time.time()
    ends = [begun + 10.6]

    watch = DeadlineWatch(lambda: ends[0], lead=10.0, refresh=300.0)
    time.sleep(0.3)
    ends[0] = begun + 3600
    while time.time() < begun + 0.8:
        assert not watch.due()
        time.sleep(0.02)
    watch.close()


def test_it_is_due_a_lead_before_the_end_and_a_scheduler_that_is_silent_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(DeadlineWatch, "_shortest", 0.05)
    answers: list[float | None] = [time.time() + 5.3]
    watch = DeadlineWatch(lambda: answers.pop() if answers else None, lead=5.0, refresh=300.0)
    assert not watch.due()
    time.sleep(0.4)
    assert watch.due()
    watch.close()


def test_a_job_without_a_limit_is_never_due() -> None:
    watch = DeadlineWatch(lambda: None, lead=5.0)
    assert not watch.due()
    watch.close()
