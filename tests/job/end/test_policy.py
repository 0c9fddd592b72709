"""The ends that are followed by another start."""

from dataclasses import replace

import pytest

from hpcrun.job.policy import Budgets, decide
from hpcrun.run.attempt import Attempt
from hpcrun.run.journal.events import Cause, Event
from hpcrun.run.journal.state import AttemptRecord, State
from tests.support.journal import event as made

CRASH, HANG, LIMIT = Cause.CRASH, Cause.HANG, Cause.TIME_LIMIT
PREEMPTION, NODE = Cause.PREEMPTION, Cause.NODE_FAILURE


def record(
    cause: Cause, *, begun: int = 0, committed: int | None = 10, crash: int | None = None
) -> AttemptRecord:
    return AttemptRecord(Attempt("1", 0), 0.0, begun, committed, cause, crash)


def progress(causes: list[Cause], crashes: list[int] | None = None) -> list[AttemptRecord]:
    """Return attempts that each commit ten steps more than the previous attempt."""
    return [
        record(
            cause, begun=10 * n, committed=10 * n + 10, crash=crashes[n] if crashes else 10 * n + 5
        )
        for n, cause in enumerate(causes)
    ]


@pytest.mark.parametrize(
    "cause", [Cause.FINISHED, Cause.CANCELLED, Cause.BAD_INPUT, Cause.SAVE_FAILED, Cause.EXHAUSTED]
)
def test_final_causes_are_not_followed_by_another_start(cause: Cause) -> None:
    assert not decide([record(cause)], Budgets()).restart


def test_preemptions_never_eat_the_budget_for_crashes() -> None:
    history = progress([Cause.PREEMPTION] * 50 + [Cause.CRASH])
    assert decide(history, Budgets(crash=1)).restart


def test_a_crash_beyond_the_budget_names_the_key() -> None:
    assert decide(progress([Cause.CRASH] * 3), Budgets(crash=3)).restart
    told = decide(progress([Cause.CRASH] * 4), Budgets(crash=3))
    assert not told.restart
    assert "4 crashes, 3 allowed (restarts.crash)" in told.reason
    first = decide(progress([Cause.CRASH]), Budgets(crash=0))
    assert first.reason == "1 crash, 0 allowed (restarts.crash)"


def test_hangs_have_a_budget_of_their_own() -> None:
    assert decide(progress([Cause.HANG] * 3 + [Cause.CRASH] * 3), Budgets()).restart
    told = decide(progress([Cause.HANG] * 4), Budgets(hang=3))
    assert not told.restart
    assert "4 hangs, 3 allowed (restarts.hang)" in told.reason


def test_a_budget_of_none_is_unlimited() -> None:
    assert decide(progress([Cause.TIME_LIMIT] * 500), Budgets()).restart


def script_ends(*causes: Cause, killed: bool = True) -> list[AttemptRecord]:
    """Return attempts of a script; its steps are unknown."""
    return [
        AttemptRecord(Attempt("1", n), 0.0, cause=cause, killed=killed)
        for n, cause in enumerate(causes)
    ]


def test_a_script_that_dies_of_every_warning_is_given_up() -> None:
    budgets = Budgets(script=True)
    early = decide(script_ends(Cause.TIME_LIMIT), budgets)
    assert early.restart
    assert "3 consecutive if the script dies of it: restarts.no_progress" in early.reason
    # A preemption in between has saved nothing either.
    limits = (Cause.TIME_LIMIT, Cause.PREEMPTION, Cause.TIME_LIMIT)
    assert decide(script_ends(*limits), budgets).restart
    told = decide(script_ends(*limits, Cause.TIME_LIMIT), budgets)
    assert not told.restart
    assert told.reason.startswith("3 consecutive times the script died of the warning")
    assert "have it save on that signal (job.warn_signal)" in told.reason
    assert "restarts.no_progress=null" in told.reason
    assert decide(
        script_ends(*[Cause.TIME_LIMIT] * 9), Budgets(no_progress=None, script=True)
    ).restart


def test_a_script_that_handles_the_warning_always_continues() -> None:
    budgets = Budgets(script=True)
    assert decide(script_ends(*[Cause.TIME_LIMIT] * 9, killed=False), budgets).restart
    assert decide(script_ends(*[Cause.PREEMPTION] * 9), budgets).restart
    saved = script_ends(Cause.TIME_LIMIT, killed=False)
    deaths = script_ends(Cause.TIME_LIMIT, Cause.TIME_LIMIT)
    assert decide([*deaths, *saved, *deaths], budgets).restart


def timed(cause: Cause, seconds: float, failure: str = "", **more: int) -> AttemptRecord:
    return AttemptRecord(Attempt("1", 0), 0.0, cause=cause, ended=seconds, failure=failure, **more)


def test_a_script_that_continues_without_work_is_given_up() -> None:
    hasty = timed(Cause.CONTINUED, 3.0)
    assert decide([hasty] * 2, Budgets(script=True)).restart
    told = decide([hasty] * 3, Budgets(script=True))
    assert not told.restart
    assert "3 consecutive times the script asked to be continued within a minute" in told.reason
    assert decide([hasty] * 9, Budgets(no_progress=None, script=True)).restart
    # Its own clock ends it every few hours.
    assert decide([timed(Cause.CONTINUED, 9000.0)] * 99, Budgets(script=True)).restart
    assert decide([hasty, timed(Cause.CONTINUED, 90.0), hasty, hasty], Budgets(script=True)).restart


def test_a_script_that_reports_saves_is_judged_like_a_task() -> None:
    budgets = Budgets(script=True)
    further = [timed(Cause.CONTINUED, 3.0, begun_at=n, committed=n + 1) for n in range(9)]
    assert decide(further, budgets).restart
    idle_ends = [timed(Cause.CONTINUED, 9000.0, begun_at=9)] * 3
    told = decide([*further, *idle_ends], budgets)
    assert not told.restart
    assert "committed no new step (restarts.no_progress)" in told.reason
    killed = AttemptRecord(Attempt("1", 0), 0.0, begun_at=9, committed=10, cause=LIMIT, killed=True)
    assert decide([killed] * 9, budgets).restart


PLACE, OTHER = "KeyError at /me/a.py:7", "KeyError at /me/a.py:9"


@pytest.mark.parametrize(
    ("history", "again"),
    [
        ([(4.0, PLACE)], True),
        ([(4.0, PLACE), (4.0, PLACE)], False),
        ([(4.0, PLACE), (4.0, OTHER)], True),
        ([(4.0, ""), (4.0, "")], True),
        # Imports from a busy file system take minutes.
        ([(400.0, PLACE), (350.0, PLACE)], False),
        # The second attempt continued from the script's own checkpoint.
        ([(7000.0, PLACE), (30.0, PLACE)], False),
        ([(30.0, PLACE), (7000.0, PLACE)], True),
        # Preemptions do not interrupt the series.
        ([(30.0, PLACE), (90.0, None), (30.0, PLACE)], False),
        # The script has worked: an unavailable file server gives equal messages too.
        ([(7000.0, None), (30.0, PLACE), (30.0, PLACE)], True),
        ([(7000.0, OTHER), (30.0, PLACE), (30.0, PLACE)], True),
    ],
)
def test_the_same_failure_twice_ends_a_script(
    history: list[tuple[float, str | None]], again: bool
) -> None:
    records = [
        timed(PREEMPTION if failure is None else CRASH, seconds, failure or "")
        for seconds, failure in history
    ]
    told = decide(records, Budgets(script=True))
    assert told.restart is again, told.reason
    assert again or told.reason.endswith(f"(restarts.same_step): {PLACE}")
    assert decide(records, Budgets(script=True, same_step=None)).restart


def test_a_failure_after_progress_needs_the_same_step() -> None:
    far = [timed(CRASH, 90.0, PLACE, begun_at=0, committed=4, crash_step=n) for n in (6, 9)]
    assert decide(far, Budgets(script=True)).restart
    near = [timed(CRASH, 90.0, PLACE, crash_step=n) for n in (6, 9)]
    assert decide(near, Budgets(script=True)).restart
    assert not decide([near[0]] * 2, Budgets(script=True)).restart


def test_two_crashes_at_one_step_stop_the_run() -> None:
    same = progress([Cause.CRASH, Cause.PREEMPTION, Cause.CRASH], crashes=[5, 0, 5])
    told = decide(same, Budgets())
    assert not told.restart
    assert "2 times at step 5" in told.reason
    assert decide(progress([Cause.CRASH] * 2, crashes=[5, 6]), Budgets()).restart


@pytest.mark.parametrize(
    ("crashes", "passing", "again"),
    [
        ((PLACE, PLACE), (False, False), False),
        (("SIGSEGV", "SIGSEGV"), (False, False), False),
        # Two causes at one step, such as the first step of each start.
        ((PLACE, OTHER), (False, False), True),
        (("SIGKILL", PLACE), (False, False), True),
        # The file system has failed twice.
        ((PLACE, PLACE), (True, True), True),
        ((PLACE, PLACE), (True, False), True),
    ],
)
def test_two_causes_at_one_step_are_not_the_same_failure(
    crashes: tuple[str, str], passing: tuple[bool, bool], again: bool
) -> None:
    records = [
        replace(record(CRASH, begun=5, committed=None, crash=5), crash=crash, passing=passes)
        for crash, passes in zip(crashes, passing, strict=True)
    ]
    assert decide(records, Budgets()).restart is again


def idle(*causes: Cause) -> list[AttemptRecord]:
    """Return attempts that commit no new step; each crash is at another step."""
    return [record(cause, begun=10, committed=None, crash=n) for n, cause in enumerate(causes)]


@pytest.mark.parametrize(
    ("causes", "again"),
    [
        ((CRASH, CRASH), True),
        ((CRASH, CRASH, CRASH), False),
        ((HANG, CRASH, HANG), False),
        # The job had all the time that it asked for.
        ((LIMIT, LIMIT, LIMIT), False),
        # The cluster caused this end, for example during a long start.
        ((PREEMPTION,) * 20, True),
        ((NODE,) * 10, True),
        ((PREEMPTION, NODE, PREEMPTION, NODE), True),
        # These ends neither interrupt a series of the run's own failures nor add to it.
        ((CRASH, PREEMPTION, CRASH, NODE), True),
        ((CRASH, PREEMPTION, CRASH, NODE, CRASH), False),
    ],
)
def test_only_ends_of_the_run_s_doing_lack_progress(causes: tuple[Cause, ...], again: bool) -> None:
    told = decide(idle(*causes), Budgets())
    assert told.restart is again, told.reason
    assert again or "committed no new step (restarts.no_progress)" in told.reason


def test_a_new_commit_ends_the_row_of_attempts_without_progress() -> None:
    row = [*idle(HANG, HANG), record(PREEMPTION, begun=10, committed=20), *idle(HANG)]
    assert decide(row, Budgets()).restart


def test_attempts_with_only_a_report_left_have_progress() -> None:
    log = [
        event(what, restart, cause="hang" if what == "ended" else None, step=10)
        for restart in range(4)
        for what in ("opened", "started", "trained", "ended")
    ]
    assert decide(histories(log), Budgets(no_progress=3, hang=None)).restart
    # Attempts that ended while they restored count.
    rest = [one for one in log if one.tag != "trained" or one.attempt == Attempt("1", 0)]
    assert not decide(histories(rest), Budgets(no_progress=3, hang=None)).restart


def event(what: str, restart: int = 0, job: str = "1", **more: object) -> Event:
    step = more.pop("step", None)
    cause = more.pop("cause", None)
    return made(what, Attempt(job, restart), time=0.0, cause=cause, step=step, **more)


def histories(log: list[Event]) -> list[AttemptRecord]:
    return State(log).attempts_of_newest_job


def last_committed(log: list[Event]) -> int | None:
    return State(log).committed


def test_lives_are_read_from_the_log() -> None:
    found = histories(
        [
            event("submitted"),
            event("opened"),
            event("started", step=0),
            event("saved", step=20),
            event("ended", cause="crash", step=23),
            event("opened", restart=1),
            event("started", restart=1, step=20),
        ]
    )
    assert [one.cause for one in found] == [Cause.CRASH, None]
    assert found[0].crash_step == 23
    assert found[0].progressed
    assert not found[1].progressed


def test_a_new_submission_gives_new_budgets_but_keeps_the_checkpoints() -> None:
    log = [
        event("ended", cause="crash", step=3),
        event("saved", step=20),
        event("opened", job="2"),
        event("submitted", job="2"),
        event("started", job="2", step=20),
    ]
    assert [one.attempt.job for one in histories(log)] == ["2"]
    assert last_committed(log) == 20


def test_a_start_below_the_newest_save_shows_what_remains() -> None:
    log = [event("started", step=0), event("saved", step=900), event("saved", step=986)]
    assert last_committed(log) == 986
    log += [event("opened", job="2"), event("started", job="2", step=900)]
    assert last_committed(log) == 900
    log += [event("saved", job="2", step=901)]
    assert last_committed(log) == 901
    # A script counts no steps.
    assert last_committed([*log, event("started", job="3")]) == 901
    assert last_committed([*log, event("started", job="3", step=0)]) is None


@pytest.mark.parametrize("on_disk", [20, None])
def test_a_start_from_memory_is_no_commit(on_disk: int | None) -> None:
    log = [
        event("opened"),
        event("started", step=on_disk or 0),
        event("ended", cause="crash", step=31),
        event("opened", restart=1),
        event("started", restart=1, step=30, on_disk=on_disk),
        event("ended", restart=1, cause="crash", step=41),
    ]
    assert [one.progressed for one in histories(log)] == [False, False]
    assert [one.begun_at for one in histories(log)] == [on_disk or 0, 30]
    assert last_committed(log) == on_disk


def test_an_unannounced_commit_is_seen_at_the_next_start() -> None:
    found = histories(
        [
            event("opened"),
            event("started", step=0),
            event("opened", restart=1),
            event("ended", cause="crash", step=23),
            event("started", restart=1, step=20),
            event("ended", restart=1, cause="crash", step=22),
            event("opened", restart=2),
            event("started", restart=2, step=20),
        ]
    )
    assert [one.progressed for one in found] == [True, False, False]
    assert [one.cause for one in found] == [Cause.CRASH, Cause.CRASH, None]
