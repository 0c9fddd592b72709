"""The attempt that the doctor reads."""

from hpcrun.diagnose.run_lines import attempt_to_diagnose
from hpcrun.run.events import Attempt, Event

FIRST, SECOND = Attempt("1", 0), Attempt("1", 1)


def event(what: str, attempt: Attempt, cause: str | None = None) -> Event:
    return Event(what, 0.0, attempt, cause, None, {})


def test_a_refused_attempt_has_the_cause_before_it() -> None:
    begun = [event("submitted", FIRST), event("opened", FIRST), event("ended", FIRST, "preemption")]
    refused = [event("refused", SECOND), event("ended", SECOND, "exhausted")]
    assert attempt_to_diagnose([*begun, *refused]) == FIRST
    assert attempt_to_diagnose(refused) == SECOND


def test_the_newest_attempt_that_has_begun_is_read() -> None:
    begun = [event("opened", FIRST), event("ended", FIRST, "crash"), event("opened", SECOND)]
    assert attempt_to_diagnose(begun) == SECOND
    assert attempt_to_diagnose([event("submitted", FIRST)]) is None
