"""The table of runs that make no progress, and of clocks that differ."""

import os
import time
from pathlib import Path
from typing import Any

import pytest

from hpcrun.api.pace import facts
from hpcrun.cli.main import guarded
from hpcrun.run.directory import RunDirectory, create
from hpcrun.run.files import append_line
from tests.cli.test_status import rows, squeue_says

CONFIG = "command: []\ntrain:\n  steps: 2000\n"


def running(
    folder: Path,
    *,
    lines: int,
    age: float,
    writer: float = 0.0,
    script: bool = False,
    saved: bool = True,
    executor: str = "slurm",
) -> RunDirectory:
    """A run with a line each 5 s, the last ``age`` seconds ago; ``writer``: the error of its clock."""
    run = create(folder / "runs" / "gpt", "command: [x]\n" if script else CONFIG, {})
    now = time.time()
    last = now - age
    first = last - 5.0 * lines

    def event(what: str, when: float, **more: Any) -> None:
        line = {"event": what, "job": "7", "restart": 0, "time": when + writer}
        append_line(run.events, line | more)
        os.utime(run.events, (when, when))

    event("submitted", first - 20, executor=executor, name="gpt")
    event("opened", first - 10, **({"script": True} if script else {}))
    event("started", first, step=0)
    for number in range(1, lines + 1):
        when = first + 5.0 * number
        append_line(
            run.metrics, {"step": 10 * number, "time": when + writer, "restart": 0, "loss": 1}
        )
        os.utime(run.metrics, (when, when))
    if saved and lines:
        event("saved", first + 5, step=10, seconds=0.0)
    return run


@pytest.mark.parametrize("reader", [0.0, 3600.0, -3600.0])
@pytest.mark.parametrize("writer", [0.0, 3600.0, -3600.0])
@pytest.mark.parametrize(
    ("lines", "age", "says", "eta", "stalled"),
    [
        (20, 4, "running", (2000 - 200) / 2 - 4, 0),
        (20, 25, "running", None, 0),
        (20, 120, "running: no step for 2 min", None, 120),
        (20, 3 * 3600, "running: no step for 3 h", None, 3 * 3600),
        (0, 30, "running", None, 0),
        (0, 300, "running: no step reported for 5 min", None, 0),
    ],
)
def test_a_stall_shows_whatever_the_clocks_say(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    reader: float,
    writer: float,
    lines: int,
    age: float,
    says: str,
    eta: float | None,
    stalled: float,
) -> None:
    monkeypatch.chdir(tmp_path)
    running(tmp_path, lines=lines, age=age, writer=writer)
    real = time.time
    monkeypatch.setattr("time.time", lambda: real() + reader)
    squeue_says(tmp_path, monkeypatch, "7|RUNNING||N/A,N/A|1:00|None|gpt")
    (row,) = rows(capsys)
    assert (row["state"], row["says"]) == ("running", says)
    assert row["eta_seconds"] == (None if eta is None else pytest.approx(eta, abs=30))
    parts = row["goodput"]
    # The first line was saved after 5 s.
    assert parts["productive"] == (5 if lines else 0)
    assert parts["stalled"] == pytest.approx(stalled, abs=30)
    assert parts["wall"] == pytest.approx(20 + 5 * lines + age, abs=30)
    assert [*(tmp_path / "runs" / "gpt").glob("tmp*")] == []


def test_a_stall_is_in_the_table_of_80_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    running(tmp_path, lines=20, age=119 * 60)
    squeue_says(tmp_path, monkeypatch, "7|RUNNING||N/A,N/A|1:00|None|gpt")
    assert guarded(["status"]) == 0
    heading, row = capsys.readouterr().out.splitlines()
    assert "running: no step for 119 min" in row
    assert "ETA" not in heading
    assert len(row) <= 80


@pytest.mark.parametrize(
    ("lines", "silent", "says", "known"),
    [
        (0, 60, "running", False),
        # A script may report once an epoch: only the absence of any output is remarkable.
        (1, 500, "running", False),
        (0, 900, "running: no output for 15 min", False),
        (20, 120, "running: no step for 2 min", True),
    ],
)
def test_a_silent_script_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    lines: int,
    silent: float,
    says: str,
    known: bool,
) -> None:
    monkeypatch.chdir(tmp_path)
    running(tmp_path, lines=lines, age=silent, script=True, saved=known)
    squeue_says(tmp_path, monkeypatch, "7|RUNNING||N/A,N/A|1:00|None|gpt")
    (row,) = rows(capsys)
    assert row["says"] == says
    assert (row["goodput"]["running"] > 0) == (not known)
    monkeypatch.setenv("COLUMNS", "200")
    assert guarded(["status"]) == 0
    assert ("goodput" in capsys.readouterr().out) == known


def test_the_figures_of_a_lost_run_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    running(tmp_path, lines=20, age=600, executor="local")
    found = []
    for later in (0.0, 900.0):
        real = time.time
        with monkeypatch.context() as patch:
            patch.setattr("time.time", lambda: real() + later)  # noqa: B023
            (row,) = rows(capsys)
        assert row["state"] == "lost"
        found.append(row["goodput"])
    assert found[0] == found[1]
    assert (found[0]["productive"], found[0]["unsaved"]) == (5, 0)
    assert found[0]["recomputed"] == pytest.approx(95, abs=1)


def test_a_stall_is_no_part_of_the_pace() -> None:
    times = [*range(0, 100, 10), *range(1300, 1400, 10)]
    lines = [{"step": step, "time": when} for step, when in enumerate(times, 1)]
    assert facts(lines, 120).left(0.0) == 1000
    # Slow lines are a pace too.
    slow = [{"step": step, "time": 90.0 * step} for step in range(9)]
    assert facts(slow, 18).left(0.0) == 900
