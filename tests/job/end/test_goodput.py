"""Every second of a run belongs to exactly one part."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcrun.run.attempt import Attempt
from hpcrun.run.goodput import Goodput
from hpcrun.run.goodput import goodput as goodput_of
from hpcrun.run.journal.events import Event
from hpcrun.run.journal.state import State
from tests.support.journal import event as made


def event(what: str, time: float, restart: int = 0, **more: object) -> Event:
    return made(what, Attempt("1", restart), time=time, **more)


def in_place(what: str, time: float, number: int = 1, **more: object) -> Event:
    return made(what, Attempt("1", 0, number), time=time, **more)


def goodput(log: list[Event], now: float, *rest: float | None, lost: bool = False) -> Goodput:
    return goodput_of(State(log), now, *rest, lost=lost)


CRASHED_ONCE = [
    event("submitted", 100),
    event("opened", 110),
    event("started", 115),
    event("saved", 125, seconds=1.0),
    event("ended", 132, restart_allowed=True),
    event("opened", 140, restart=1),
    event("started", 144, restart=1),
    event("saved", 154, restart=1, seconds=2.0),
    event("finished", 155, restart=1),
    event("ended", 157, restart=1, restart_allowed=False),
]


def test_a_crash_costs_what_came_after_the_last_commit() -> None:
    account = goodput(CRASHED_ONCE, now=1000.0)
    assert account.queue == 10
    assert account.start_up == 5 + 4 + 1 + 2
    assert account.productive == 9 + 8
    assert account.checkpoint == 3
    assert account.recomputed == 7
    assert account.requeue_wait == 8
    assert account.wall == 57
    assert account.ettr == pytest.approx(17 / 57)


@pytest.mark.parametrize(("snapshot", "kept"), [(130.0, 5), (124.0, 0), (999.0, 7)])
def test_a_snapshot_in_memory_keeps_the_steps_before_it(snapshot: float, kept: int) -> None:
    log = [*CRASHED_ONCE[:5], in_place("opened", 140), in_place("started", 144)]
    before = goodput(log, now=144)
    log[-1] = in_place("started", 144, snapshot=snapshot, on_disk=4)
    account = goodput(log, now=144)
    assert account.recomputed == before.recomputed - kept == 7 - kept
    assert account.productive == before.productive + kept
    assert account.wall == before.wall


# The second attempt continues from a snapshot at 130, and no event `saved` follows.
FROM_MEMORY = [
    *CRASHED_ONCE[:5],
    in_place("opened", 133),
    in_place("started", 134, snapshot=130.0, on_disk=4),
    in_place("ended", 150, restart_allowed=True),
]


@pytest.mark.parametrize(
    ("later", "kept", "lost"),
    [
        ([], 5, 2 + 16),
        ([event("opened", 160, restart=1)], 0, 7 + 16),
        ([event("opened", 160, restart=1), event("started", 160, restart=1)], 0, 7 + 16),
        ([in_place("started", 160, 2, snapshot=140.0)], 5 + 6, 2 + 10),
        # The same snapshot again, and an older one.
        ([in_place("started", 160, 2, snapshot=130.0)], 5, 2 + 16),
        ([in_place("started", 160, 2, snapshot=127.0)], 2, 5 + 16),
        ([in_place("started", 160, 2)], 0, 7 + 16),
    ],
    ids=["no start", "requeue", "from disk", "newer", "same", "older", "in place from disk"],
)
def test_steps_that_only_memory_kept_are_lost_with_it(
    later: list[Event], kept: int, lost: int
) -> None:
    opened = [in_place("opened", 150, 2)] if later and later[0].tag == "started" else []
    account = goodput([*FROM_MEMORY, *opened, *later], now=160)
    assert (account.productive - 9, account.recomputed) == (kept, lost)


def test_an_end_without_a_restart_loses_the_memory() -> None:
    log = [*FROM_MEMORY[:-1], in_place("ended", 150, restart_allowed=False)]
    assert goodput(log, now=160).recomputed == 7 + 16


def test_a_save_keeps_the_steps_that_only_memory_had() -> None:
    log = [
        *FROM_MEMORY[:-1],
        in_place("saved", 140, seconds=0.0),
        in_place("ended", 150, restart_allowed=True),
        event("opened", 160, restart=1),
        event("started", 160, restart=1),
    ]
    account = goodput(log, now=160)
    assert (account.productive - 9, account.recomputed) == (5 + 6, 2 + 10)


def of_script(*rows: tuple[str, float, int, int | None]) -> list[Event]:
    """The log of a script: kind, time, restart and step of each event; a step -1 marks a finished end."""
    return [
        made(
            what,
            Attempt("1", restart),
            time=time,
            cause="finished" if step == -1 else None,
            step=step,
            script=what == "opened",
            restart_allowed=what == "ended" and step is None,
        )
        for what, time, restart, step in rows
    ]


DIED_IN_SETUP = [
    ("submitted", 0.0, 0, None),
    ("opened", 10.0, 0, None),
    ("started", 12.0, 0, None),
    ("ended", 112.0, 0, None),
    ("opened", 122.0, 1, None),
    ("started", 124.0, 1, None),
]


@pytest.mark.parametrize(
    ("later", "parts"),
    [
        # Nothing is reported: nobody knows what was kept.
        ([("ended", 150.0, 1, -1)], {"running": 126.0, "ettr": None}),
        ([("stepped", 130.0, 1, 1)], {"start_up": 110.0, "unsaved": 30.0, "ettr": None}),
        ([("stepped", 130.0, 1, 1), ("ended", 150.0, 1, -1)], {"productive": 20.0, "recomputed": 0.0}),
        ([("stepped", 130.0, 1, 1), ("ended", 150.0, 1, None)], {"productive": 0.0, "recomputed": 20.0}),
        (
            [("stepped", 130.0, 1, 1), ("saved", 140.0, 1, 9), ("ended", 150.0, 1, None)],
            {"productive": 10.0, "recomputed": 10.0},
        ),
        # A log from before the event `stepped`.
        ([("saved", 140.0, 1, 9)], {"productive": 16.0, "unsaved": 20.0}),
    ],
    ids=["silent", "live", "finished", "died", "saved", "old log"],
)  # fmt: skip
def test_a_script_has_productive_time_once_it_reports(
    later: list[tuple[str, float, int, int | None]], parts: dict[str, float | None]
) -> None:
    account = goodput(of_script(*DIED_IN_SETUP, *later), now=160.0)
    assert {name: account.as_record()[name] for name in parts} == parts
    assert account.wall == (150 if later[-1][0] == "ended" and later[-1][3] == -1 else 160)


@pytest.mark.parametrize(("first", "kept"), [(1, 0), (10, 10), (5, 0), (15, 10), (21, 20)])
def test_a_script_that_begins_again_has_lost_its_saves(first: int, kept: float) -> None:
    log = of_script(
        ("opened", 0.0, 0, None), ("started", 1.0, 0, None), ("stepped", 10.0, 0, 1),
        ("saved", 20.0, 0, 10), ("saved", 30.0, 0, 20), ("ended", 35.0, 0, None),
        ("opened", 40.0, 1, None), ("started", 41.0, 1, None), ("stepped", 50.0, 1, first),
    )  # fmt: skip
    assert goodput(log, now=60.0).productive == kept


RUNNING = CRASHED_ONCE[:4]


@pytest.mark.parametrize(
    ("stepped", "lost", "parts"),
    [
        (None, False, {"productive": 9.0, "unsaved": 75.0, "stalled": 0.0}),
        (130.0, False, {"productive": 9.0, "unsaved": 5.0, "stalled": 70.0}),
        (None, True, {"productive": 9.0, "unsaved": 0.0, "recomputed": 75.0}),
    ],
    ids=["live", "stalled", "lost"],
)
def test_only_steps_that_a_checkpoint_kept_are_productive(
    stepped: float | None, lost: bool, parts: dict[str, float]
) -> None:
    account = goodput(RUNNING, 200.0, stepped, lost=lost)
    assert {name: getattr(account, name) for name in parts} == parts


@pytest.mark.parametrize("ahead", [3600, -3600, 100])
def test_another_clock_of_the_submitter_changes_only_the_queue(ahead: float) -> None:
    log = [event("submitted", 100 + ahead), *CRASHED_ONCE[1:]]
    account, right = goodput(log, now=1000.0), goodput(CRASHED_ONCE, now=1000.0)
    assert account.queue == max(0, 10 - ahead)
    assert account.wall - account.queue == right.wall - right.queue
    assert (account.productive, account.recomputed) == (right.productive, right.recomputed)


def test_nothing_is_lost_with_a_report_that_was_not_made() -> None:
    log = [*CRASHED_ONCE[:4], event("trained", 125), *CRASHED_ONCE[4:]]
    account, before = goodput(log, now=1000.0), goodput(CRASHED_ONCE, now=1000.0)
    assert (account.recomputed, account.start_up) == (0, before.start_up + 7)


def test_unwanted_time_is_idle_and_not_in_the_ratio() -> None:
    log = [
        event("submitted", 0),
        event("opened", 1),
        event("started", 2),
        event("saved", 12, seconds=0.0),
        event("stopped", 12),
        event("ended", 13, restart_allowed=False),
        made("submitted", Attempt("2", 0), time=1013),
        made("opened", Attempt("2", 0), time=1014),
        made("started", Attempt("2", 0), time=1015),
    ]
    account = goodput(log, now=1020.0)
    assert account.idle == 1000
    assert (account.productive, account.unsaved) == (10, 5)
    assert account.ettr == pytest.approx(10 / 15)


def test_a_late_node_failure_ends_at_the_last_sign() -> None:
    log = [
        event("submitted", 0),
        event("opened", 1),
        event("started", 2),
        event("saved", 10, seconds=0.0),
        event("ended", 50, last_seen=16.0, restart_allowed=True),
        event("opened", 50, restart=1),
    ]
    account = goodput(log, now=50.0)
    assert (account.recomputed, account.requeue_wait) == (6, 34)


def test_an_end_written_later_leaves_the_queue_time() -> None:
    log = [
        event("submitted", 0),
        event("opened", 1),
        event("started", 2),
        event("saved", 12, seconds=0.0),
        event("stopped", 12),
        made("submitted", Attempt("2", 0), time=1012),
        event("ended", 1020, last_seen=14.0, restart_allowed=False),
        made("opened", Attempt("2", 0), time=1020),
    ]
    account = goodput(log, now=1021.0)
    assert (account.idle, account.queue) == (998, 1 + 8)
    assert (account.start_up, account.wall) == (1 + 2 + 1, 1021)


@given(st.lists(st.floats(-5, 20), min_size=len(CRASHED_ONCE), max_size=len(CRASHED_ONCE)))
def test_the_parts_add_up_with_wrong_clocks_of_hosts(jitter: list[float]) -> None:
    log = [
        made(one.tag, one.attempt, time=one.time + shift, **one.own)
        for one, shift in zip(CRASHED_ONCE, jitter, strict=True)
    ]
    account = goodput(log, now=1000.0)
    latest = max(one.time for one in log)
    assert account.wall == pytest.approx(latest - log[0].time)
    assert all(value >= 0 for value in account.as_record().values() if value is not None)


def test_time_in_which_the_job_was_suspended_is_nothing_else() -> None:
    log = [
        *CRASHED_ONCE[:3],
        event("suspended", 122, seconds=4.0),
        event("saved", 125, seconds=1.0),
        event("suspended", 131, seconds=3.0),
        *CRASHED_ONCE[4:],
    ]
    account, before = goodput(log, now=1000.0), goodput(CRASHED_ONCE, now=1000.0)
    assert account.suspended == 7
    assert account.productive == before.productive - 4
    assert account.recomputed == before.recomputed - 3
    assert account.wall == before.wall
