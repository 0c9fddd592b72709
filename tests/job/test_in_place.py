"""The choice between a new step inside the allocation and a requeue."""

from itertools import pairwise

import pytest

from hpcrun.job.restart.in_place import attempt_obstacle
from hpcrun.job.restart.new_step import Allocation, allocation_obstacle
from hpcrun.job.scheduler_view import JobView
from hpcrun.run.attempt import Attempt
from hpcrun.run.journal.events import Cause, Event
from hpcrun.run.journal.state import State
from tests.support.journal import event

FIRST = Attempt("7", 1)
RUNNING = JobView("RUNNING", restarts=1, preempted=False, end_time=1000.0)


def story(attempt: Attempt, *, seconds: float, saved: bool, cause: Cause) -> list[Event]:
    made = [
        event("opened", attempt, time=0.0),
        event("started", attempt, time=1.0, step=10),
    ]
    made += [event("saved", attempt, time=2.0, step=20)] if saved else []
    facts = {"cause": cause.value, "step": 20, "restart_allowed": True}
    return [*made, event("ended", attempt, time=seconds, **facts)]


@pytest.mark.parametrize("cause", [Cause.CRASH, Cause.HANG])
def test_a_crash_or_hang_starts_again_in_place(cause: Cause) -> None:
    events = story(FIRST, seconds=30.0, saved=False, cause=cause)
    assert attempt_obstacle(State(events), FIRST, cause, wanted=True) is None
    assert (
        attempt_obstacle(State(events), FIRST, cause, wanted=False) == "restarts.in_place is false"
    )


@pytest.mark.parametrize("cause", sorted(set(Cause) - {Cause.CRASH, Cause.HANG}))
def test_any_other_end_needs_a_requeue(cause: Cause) -> None:
    events = story(FIRST, seconds=100.0, saved=True, cause=cause)
    assert attempt_obstacle(State(events), FIRST, cause, wanted=True) is not None


@pytest.mark.parametrize(
    ("seconds", "saved", "in_place"),
    [(100.0, False, True), (30.0, True, True), (30.0, False, False)],
)
def test_a_second_quick_failure_waits_for_a_requeue(
    seconds: float, saved: bool, in_place: bool
) -> None:
    second = FIRST.following
    events = [
        *story(FIRST, seconds=0.0, saved=False, cause=Cause.CRASH),
        *story(second, seconds=seconds, saved=saved, cause=Cause.CRASH),
    ]
    found = attempt_obstacle(State(events), second, Cause.CRASH, wanted=True)
    assert (found is None) == in_place, found


def test_a_failure_before_the_training_began_needs_a_requeue() -> None:
    events = story(FIRST, seconds=30.0, saved=False, cause=Cause.CRASH)
    del events[1]
    assert attempt_obstacle(State(events), FIRST, Cause.CRASH, wanted=True) is not None


def test_a_living_job_with_time_left_starts_a_step() -> None:
    assert allocation_obstacle(FIRST, Allocation(RUNNING), 100.0, 120.0) is None


@pytest.mark.parametrize(
    ("job", "now"),
    [
        (Allocation(None), 100.0),
        (Allocation(JobView("COMPLETING", 1, False, 1000.0)), 100.0),
        (Allocation(JobView("PENDING", 2, False, None)), 100.0),
        (Allocation(JobView("RUNNING", 2, False, 1000.0)), 100.0),
        (Allocation(JobView("RUNNING", 1, True, 1000.0)), 100.0),
        (Allocation(RUNNING, dead=["n2"]), 100.0),
        (Allocation(RUNNING, avoided=["n2"]), 100.0),
        (Allocation(RUNNING), 830.0),
    ],
)
def test_a_job_that_ends_or_lost_nodes_needs_a_requeue(job: Allocation, now: float) -> None:
    assert allocation_obstacle(FIRST, job, now, 120.0) is not None


def test_attempts_of_a_job_are_ordered_by_restart_and_step() -> None:
    steps = [Attempt("7", 0), Attempt("7", 0, 1), Attempt("7", 0, 10), Attempt("7", 1)]
    assert [step.owner for step in steps] == ["7-0", "7-0.1", "7-0.10", "7-1"]
    for earlier, later in pairwise(steps):
        assert earlier.is_before(later)
        assert not later.is_before(earlier)
    assert not Attempt("8", 0).is_before(Attempt("7", 1))
