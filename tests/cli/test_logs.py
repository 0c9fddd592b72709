"""The logs of all ranks and attempts, merged."""

import json
import time
from pathlib import Path

import pytest

from hpcrun.cli.follow import Tail
from hpcrun.cli.main import guarded
from hpcrun.run.attempt import Attempt
from hpcrun.run.directory import RunDirectory, create
from hpcrun.run.files import append_line
from tests.cli.terminal import Terminal
from tests.support.journal import record_event

BEGAN = time.mktime((2026, 11, 22, 14, 0, 0, 0, 0, -1))


def attempt(run: RunDirectory, restart: int, began: float, **logs: str) -> None:
    """Add an attempt of the ranks ``r0``, ``r1`` … that have printed ``logs``."""
    place = {"job": "7", "restart": restart}
    append_line(run.events, {"time": began, "event": "opened", "executor": "local", **place})
    folder = run.attempt_logs(Attempt("7", restart))
    folder.mkdir(parents=True)
    for name, text in logs.items():
        (folder / f"rank-{int(name[1:]):05d}.log").write_text(text)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """A run of two ranks that was preempted once."""
    monkeypatch.chdir(tmp_path)
    run = create(tmp_path / "runs" / "a", "{}\n", {})
    attempt(
        run,
        0,
        BEGAN,
        r0="begun\n2026-11-22 14:00:05 loading\nstep 2/9: loss 0.5\n",
        r1="begun\n2026-11-22 14:00:03,250 ready\nTraceback\n  of 1\n2026-11-22 14:00:09 bye",
    )
    append_line(run.metrics, {"step": 2, "time": BEGAN + 7, "restart": 0, "loss": 0.5})
    ended = {"time": BEGAN + 60, "event": "ended", "cause": "preemption", "reason": "why\x1b[2J"}
    append_line(run.events, ended | {"job": "7", "restart": 0, "restart_allowed": True})
    attempt(run, 1, BEGAN + 120, r0="again\n", r1="forged\rrun    | attempt ends\n")
    return run


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    capsys.readouterr()
    assert guarded(["logs", "a", *words]) == 0
    return capsys.readouterr().out.splitlines()


def test_all_ranks_and_attempts_are_merged_by_time(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    blank = " " * 8
    assert shown(capsys) == [
        "14:00:00 run    | attempt 7-0 begins, 2026-11-22",
        f"{blank} rank 0 | begun",
        f"{blank} rank 1 | begun",
        "14:00:03 rank 1 | 2026-11-22 14:00:03,250 ready",
        f"{blank} rank 1 | Traceback",
        f"{blank} rank 1 |   of 1",
        "14:00:05 rank 0 | 2026-11-22 14:00:05 loading",
        "14:00:07 rank 0 | step 2/9: loss 0.5",
        "14:00:09 rank 1 | 2026-11-22 14:00:09 bye",
        r"14:01:00 run    | attempt ends: preemption: why\x1b[2J; it starts again",
        "14:02:00 run, restart 1 | attempt 7-1 begins, 2026-11-22",
        f"{blank} rank 0, restart 1 | again",
        f"{blank} rank 1, restart 1 | … run    | attempt ends",
    ]


def test_lines_are_chosen_by_rank_and_number(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not any("rank 0" in line for line in shown(capsys, "--rank", "1"))
    assert [line[9:] for line in shown(capsys, "-n", "1")] == [
        "rank 1, restart 1 | … run    | attempt ends"
    ]
    assert guarded(["logs", "a", "--rank", "5"]) == 2


def test_under_torchrun_a_line_has_its_node(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    job = {"launcher": "torchrun", "nodes": 2, "gpus": 2}
    run.config.write_text(json.dumps({"command": ["python", "train.py"], "job": job}))
    log = run.attempt_logs(Attempt("7", 1)) / "rank-00001.log"
    log.write_text("loss 0.25\n[rank3]: ValueError\n")
    assert [line[9:] for line in shown(capsys, "--rank", "1")][-2:] == [
        "node 1, restart 1 | loss 0.25",
        "node 1, restart 1 | [rank3]: ValueError",
    ]


def test_older_attempts_are_shown_where_the_newest_has_no_log(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    attempt(run, 2, BEGAN + 200)
    assert any("rank 1 | Traceback" in line for line in shown(capsys))


def test_following_a_run_that_has_ended_prints_all_and_ends(
    run: RunDirectory, tmp_path: Path
) -> None:
    screen = Terminal(tmp_path, "logs", "-f", "a")
    assert screen.end() == 0
    assert "rank 0, restart 1 | again" in screen.text


def test_following_goes_on_across_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "work.sh").write_text(
        'echo "begins $HPCRUN_RESTART"\n'
        'while [ ! -e "go-$HPCRUN_RESTART" ]; do sleep 0.1; done\n'
        'echo "ends $HPCRUN_RESTART"\n'
        "exit $((3 - 3 * HPCRUN_RESTART))\n"
    )
    words = ("submit", "--name", "b", "--executor", "local", "--cpu", "--gpus", "1", "--detach")
    shape = ("--no-snapshot", "restarts.crash=1", "--", "sh", str(tmp_path / "work.sh"))
    assert guarded([*words, *shape]) == 0
    screen = Terminal(tmp_path, "logs", "-f", "b")
    screen.read_until(r"rank 0 +\| begins 0")
    (tmp_path / "go-0").touch()
    screen.read_until(r"rank 0 +\| ends 0")
    screen.read_until(r"rank 0, restart 1 \| begins 1")
    (tmp_path / "go-1").touch()
    assert screen.end() == 0
    assert screen.text.count("ends 1") == 1


def test_an_unfinished_line_waits_unless_nothing_can_complete_it(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"one\ntwo")
    tail = Tail(path)
    assert list(tail.read()) == [b"one"]
    with path.open("ab") as log:
        log.write(b" and a half\n\nbad address\r0x0")
    assert list(tail.read(ended=True)) == [b"two and a half", b"", b"bad address\r0x0"]
    assert not list(tail.read(ended=True))
    # Longer than one read of the file.
    with path.open("ab") as log:
        log.write(b"a" * 200_000 + b"\n" + b"b\n" * 100_000 + b"c")
    first, *others = tail.read()
    assert (len(first), others) == (200_000, [b"b"] * 100_000)
    assert list(tail.read(ended=True)) == [b"c"]


def test_logs_shows_last_words_or_why_there_are_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = create(tmp_path / "a", "{}\n", {})
    record_event(run, "opened", attempt=Attempt("7", 0), executor="local")
    folder = run.attempt_logs(Attempt("7", 0))
    folder.mkdir(parents=True)
    run.result.write_text(json.dumps({"state": "failed", "reason": "setup failed at `module`"}))
    assert guarded(["logs", str(run.path)]) == 2
    assert (
        "no rank has written a log: setup failed at `module`; see the other logs"
        in capsys.readouterr().err
    )
    (folder / "rank-00000.log").write_text("begun\nbad address 0x0")
    assert guarded(["logs", str(run.path)]) == 0
    opening, *lines = capsys.readouterr().out.splitlines()
    assert "run    | attempt 7-0 begins, " in opening
    assert lines == [f"{'':8} rank 0 | {text}" for text in ("begun", "bad address 0x0")]
