"""The table of runs."""

import sys
from pathlib import Path

import pytest

from hpcrun.cli.main import guarded
from hpcrun.run.directory import RunDirectory, create
from hpcrun.run.events import Attempt, record_event
from hpcrun.run.io.files import append_line, write_json


def run_of(folder: Path, name: str, state: str, ended: float) -> RunDirectory:
    """A run of two jobs that ended in ``state``; ``ended``: the time of its last metrics."""
    run = create(folder / "runs" / name, "x", {"created": 1.0})
    for job in ("1", "2"):
        record_event(run, "opened", attempt=Attempt(job, 0), executor="local")
    append_line(run.metrics, {"step": 3, "time": ended, "loss": 1.0})
    write_json(run.result, {"state": state, "reason": f"why {name}"})
    return run


def test_the_table_has_all_attempts_the_age_of_the_last_step_and_a_filter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.time", lambda: 10_000.0)
    run_of(tmp_path, "good", "finished", 9_958.0)
    run_of(tmp_path, "bad", "failed", 2_000.0)
    assert guarded(["status"]) == 0
    heading, *rows = capsys.readouterr().out.splitlines()
    assert heading.split()[4:7] == ["loss", "last", "attempts"]
    cells = {row.split()[0]: row.split() for row in rows}
    assert cells["good"][5:9] == ["42", "s", "ago", "2"]
    assert cells["bad"][5:9] == ["2", "h", "ago", "2"]
    assert guarded(["status", "--state", "failed"]) == 0
    told = capsys.readouterr().out
    assert "bad" in told
    assert "good" not in told
    assert guarded(["status", "--state", "running"]) == 0
    assert capsys.readouterr().out.startswith("hpcrun: no runs are running in ")


def test_where_details_do_not_fit_the_table_comes_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    run_of(tmp_path, "good", "finished", 9_958.0)
    assert guarded(["status"]) == 0
    first, heading, _row = capsys.readouterr().out.splitlines()
    assert first == "good: why good"
    assert heading.startswith("name")
