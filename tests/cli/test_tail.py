"""Lines of a growing log, and its end."""

import json
from pathlib import Path

import pytest

from hpcrun.cli.follow import Tail
from hpcrun.cli.main import guarded
from hpcrun.run.directory import create
from hpcrun.run.events import Attempt, record_event


def test_an_unfinished_line_waits_unless_nothing_can_complete_it(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"one\ntwo")
    tail = Tail(path)
    assert list(tail.read()) == [b"one"]
    with path.open("ab") as log:
        log.write(b" and a half\n\nbad address\r0x0")
    assert list(tail.last()) == [b"two and a half", b"", b"bad address\r0x0"]
    assert not list(tail.last())


def test_logs_shows_last_words_or_why_there_are_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = create(tmp_path / "a", "{}\n", {})
    record_event(run, "opened", attempt=Attempt("7", 0), executor="local")
    folder = run.attempt_logs("7", 0)
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
