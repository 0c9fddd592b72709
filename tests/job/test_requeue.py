"""The request for another start, with programs that answer like Slurm's and record their calls."""

import pytest

from hpcrun.job.restart.requeue import requeue

from .slurm_substitutes import FIRST, Desk, Hours

CANCELLED = "slurmstepd-n1: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-21T19:48:15 ***"
REQUEUED = (
    "slurmstepd-n1: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-21T19:48:16 DUE TO JOB REQUEUE ***"
)


def test_a_job_that_is_being_cancelled_is_not_requeued(desk: Desk) -> None:
    desk.answer(
        "scontrol",
        f"{desk.tells(CANCELLED)}; echo 'JobId=7 JobState=COMPLETING Restarts=0 '",
    )
    assert desk.requeue() == "cancelled"
    assert desk.asked() == []


def test_a_job_ended_for_no_known_reason_is_not_requeued(desk: Desk) -> None:
    desk.answer("scontrol", "echo 'JobId=7 JobState=COMPLETING Restarts=0 '")
    assert desk.requeue() == "cancelled"
    assert desk.asked() == []


def test_a_cancellation_that_the_requeue_has_undone_is_done_again(desk: Desk) -> None:
    met = f"[ $1 = requeue ] && {{ {desk.tells(CANCELLED, REQUEUED)}; }}"
    desk.answer("scontrol", f"[ $1 = show ] && echo 'JobId=7 JobState=RUNNING Restarts=0 '; {met}")
    assert desk.requeue() == "cancelled"
    assert desk.asked() == ["scontrol requeue 7", "scancel 7"]


def test_a_requeue_without_a_cancellation_is_left_to_slurm(desk: Desk) -> None:
    met = f"[ $1 = requeue ] && {{ {desk.tells(REQUEUED)}; }}"
    desk.answer("scontrol", f"[ $1 = show ] && echo 'JobId=7 JobState=RUNNING Restarts=0 '; {met}")
    assert desk.requeue() == "requeued"
    assert desk.asked() == ["scontrol requeue 7"]


def test_a_preempted_job_canceled_in_grace_is_not_requeued(desk: Desk) -> None:
    """The controller's newest state counts more than an earlier preemption."""
    json = '{"jobs": [{"job_state": ["CANCELLED", "COMPLETING"], "preempt_time": 1795315834}]}'
    text = "JobId=7 JobState=COMPLETING Restarts=0 PreemptTime=1795315834"
    desk.answer("scontrol", f"[ \"$4\" = --json ] && echo '{json}' || echo '{text}'")
    assert requeue(FIRST, pytest.fail, lambda: "preemption", patience=0.0) == "cancelled"
    assert desk.asked() == []


def test_an_unreachable_controller_is_waited_for_and_reported_at_intervals(desk: Desk) -> None:
    count = desk.folder / "count"
    count.write_text("")
    away = (
        f"[ $1 = requeue ] || {{ echo -n x >> {count}; [ $(wc -c < {count}) -gt 40 ]; }} || exit 1"
    )
    desk.answer(
        "scontrol", f"{away}; [ $1 = show ] && echo 'JobId=7 JobState=RUNNING Restarts=0 '; true"
    )
    clock, told = Hours(desk), list[str]()
    became = requeue(
        FIRST, lambda *words: told.append(": ".join(words)), until=3600.0, patience=0.0, clock=clock
    )
    assert became == "requeued"
    assert desk.asked() == ["scontrol requeue 7"]
    assert 900 < clock.time < 1800
    assert clock.waits[:4] == [5.0, 10.0, 20.0, 30.0]
    assert max(clock.waits) == 30.0
    assert 3 <= len(told) <= 6
    assert set(told) == {"transient: the controller does not answer"}


def test_a_controller_that_stays_away_is_given_up(desk: Desk) -> None:
    desk.answer("scontrol", "exit 1")
    clock = Hours(desk)
    assert requeue(FIRST, lambda *_: None, until=600.0, clock=clock) == "refused"
    assert 600 <= clock.time <= 630


def refusing(desk: Desk, then: str) -> None:
    """Let scontrol refuse five requeues with an unknown message, and then show ``then`` for the job."""
    asked = f"$(grep -c requeue {desk.calls})"
    desk.answer(
        "scontrol",
        f"""[ $1 = requeue ] && {{ echo nix >&2; exit 1; }}
        [ {asked} -lt 5 ] && echo 'JobId=7 JobState=RUNNING Restarts=0 ' && exit 0
        {then}""",
    )


@pytest.mark.parametrize(
    ("then", "becomes"),
    [
        ("echo 'JobId=7 JobState=RUNNING Restarts=0 '", "forbidden"),
        # A requeue was accepted after all, or another program requeued the job.
        ("echo 'JobId=7 JobState=PENDING Restarts=1 '", "requeued"),
        ("echo 'JobId=7 JobState=COMPLETING Restarts=0 '", "cancelled"),
        ("exit 1", "refused"),
    ],
)
def test_after_five_unknown_refusals_the_job_state_decides(
    desk: Desk, then: str, becomes: str
) -> None:
    refusing(desk, then)
    clock, told = Hours(desk), list[str]()
    failed = lambda kind, _: told.append(kind)  # noqa: E731
    assert requeue(FIRST, failed, until=1e9, patience=0.0, clock=clock) == becomes
    assert desk.asked() == ["scontrol requeue 7"] * 5
    assert told == ["unknown"] * 5
    assert clock.waits == [5.0, 10.0, 20.0, 30.0]


GRACE = (
    "JobId=7 JobState=RUNNING Restarts=0 Requeue={} PreemptTime=1795315834 Partition=batch QOS=low"
)


@pytest.mark.parametrize(
    ("version", "mode", "requeue_bit", "becomes"),
    [
        ("26.05.3", "REQUEUE", 1, "by-slurm"),
        ("24.05.0", "REQUEUE", 1, "by-slurm"),
        ("23.11.4", "REQUEUE", 1, "requeued"),
        ("22.05.8", "REQUEUE", 1, "requeued"),
        ("26.05.3", "CANCEL", 1, "requeued"),
        ("26.05.3", "REQUEUE", 0, "requeued"),
    ],
)
def test_a_job_in_its_grace_time_is_left_to_slurm(
    desk: Desk, version: str, mode: str, requeue_bit: int, becomes: str
) -> None:
    desk.answer(
        "scontrol",
        f"""case "$1 $2" in
        "show job") echo '{GRACE.format(requeue_bit)}' ;;
        "show config") printf 'SLURM_VERSION = {version}\nPreemptMode = OFF\n' ;;
        "show partition") printf 'PartitionName=batch\n   OverTimeLimit=NONE PreemptMode={mode}\n' ;;
        esac""",
    )
    assert requeue(FIRST, pytest.fail, desk.word, patience=0.0) == becomes


@pytest.mark.parametrize("how", ["missing", "closed", "wrong version"])
def test_a_scontrol_that_cannot_run_does_not_hold_the_nodes(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setenv("PATH", str(desk.folder))
    program = desk.folder / "scontrol"
    if how == "missing":
        program.unlink()
    elif how == "closed":
        program.write_text("no program")
    else:
        program.write_text(
            "#!/bin/sh\necho 'scontrol: Incompatible versions of client' >&2; exit 1\n"
        )
    clock, told = Hours(desk), list[str]()
    assert requeue(FIRST, lambda *said: told.extend(said), until=1e9, clock=clock) == "refused"
    assert clock.waits == [5.0, 10.0, 20.0, 30.0]
    assert "controller" not in " ".join(told)
