"""Every second of a run belongs to exactly one part."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcrun.job.history import goodput
from hpcrun.run.events import Attempt, Event


def event(what: str, time: float, restart: int = 0, **more: object) -> Event:
    return Event(what, time, Attempt("1", restart), None, None, dict(more))


def in_place(what: str, time: float, number: int = 1, **more: object) -> Event:
    return Event(what, time, Attempt("1", 0, number), None, None, dict(more))


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
    opened = [in_place("opened", 150, 2)] if later and later[0].what == "started" else []
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


def test_a_script_is_productive_from_its_start_to_its_end() -> None:
    log = [
        event("submitted", 0),
        event("opened", 10, script=True),
        event("started", 12),
        event("stopped", 40),
        event("ended", 41, restart_allowed=True),
        event("opened", 50, restart=1, script=True),
        event("started", 51, restart=1),
        event("ended", 71, restart=1, restart_allowed=False),
    ]
    account = goodput(log, now=1000.0)
    assert (account.productive, account.start_up) == (28 + 20, 2 + 1 + 1)
    assert (account.recomputed, account.requeue_wait, account.queue) == (0, 9, 10)


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
        Event("submitted", 1013, Attempt("2", 0), None, None, {}),
        Event("opened", 1014, Attempt("2", 0), None, None, {}),
        Event("started", 1015, Attempt("2", 0), None, None, {}),
    ]
    account = goodput(log, now=1020.0)
    assert account.idle == 1000
    assert account.productive == 15
    assert account.ettr == pytest.approx(15 / 20)


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
        Event("submitted", 1012, Attempt("2", 0), None, None, {}),
        event("ended", 1020, last_seen=14.0, restart_allowed=False),
        Event("opened", 1020, Attempt("2", 0), None, None, {}),
    ]
    account = goodput(log, now=1021.0)
    assert (account.idle, account.queue) == (998, 1 + 8)
    assert (account.start_up, account.wall) == (1 + 2 + 1, 1021)


@given(st.lists(st.floats(-5, 20), min_size=len(CRASHED_ONCE), max_size=len(CRASHED_ONCE)))
def test_the_parts_add_up_with_wrong_clocks_of_hosts(jitter: list[float]) -> None:
    log = [
        Event(one.what, one.time + shift, one.attempt, None, None, one.fields)
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
