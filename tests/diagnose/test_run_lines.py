"""The attempt that the doctor reads."""

from hpcrun.diagnose.run_lines import attempt_to_diagnose
from hpcrun.run.attempt import Attempt
from hpcrun.run.journal.events import Event
from hpcrun.run.journal.state import State
from tests.support.journal import event as made

FIRST, SECOND = Attempt("1", 0), Attempt("1", 1)


def event(what: str, attempt: Attempt, cause: str | None = None) -> Event:
    return made(what, attempt, time=0.0, cause=cause)


def test_a_refused_attempt_has_the_cause_before_it() -> None:
    begun = [event("submitted", FIRST), event("opened", FIRST), event("ended", FIRST, "preemption")]
    refused = [event("refused", SECOND), event("ended", SECOND, "exhausted")]
    assert attempt_to_diagnose(State([*begun, *refused])) == FIRST
    assert attempt_to_diagnose(State(refused)) == SECOND


def test_the_newest_attempt_that_has_begun_is_read() -> None:
    begun = [event("opened", FIRST), event("ended", FIRST, "crash"), event("opened", SECOND)]
    assert attempt_to_diagnose(State(begun)) == SECOND
    assert attempt_to_diagnose(State([event("submitted", FIRST)])) is None
