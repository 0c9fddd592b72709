"""The table of runs."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcrun.cli.main import guarded
from hpcrun.run.attempt import Attempt
from hpcrun.run.directory import RunDirectory, create
from hpcrun.run.files import append_line, write_json
from hpcrun.run.sweep_file import SweepFile, SweepRun, write_sweep
from tests.cli.terminal import Terminal
from tests.support.journal import record_event

NOW = 10_000.0


def run_of(folder: Path, name: str, state: str, ended: float) -> RunDirectory:
    """A run of two jobs that ended in ``state``; ``ended``: the time of its last metrics."""
    run = create(folder / "runs" / name, "command: []\ntrain:\n  steps: 12\n", {"created": 1.0})
    for job in ("1", "2"):
        record_event(run, "opened", attempt=Attempt(job, 0), executor="local")
    append_line(run.metrics, {"step": 3, "time": ended, "loss": 1.0, "tokens_per_second": 1500.0})
    write_json(run.result, {"state": state, "reason": f"why {name}"})
    return run


def on_slurm(folder: Path, name: str, *events: dict[str, Any]) -> RunDirectory:
    """A run with a job on Slurm, and ``events`` after its submission."""
    run = create(folder / "runs" / name, "x\n", {})
    base = {"job": "7", "restart": 0, "time": NOW}
    append_line(run.events, base | {"event": "submitted", "executor": "slurm", "name": name})
    for event in events:
        append_line(run.events, base | event)
    return run


def squeue_says(folder: Path, monkeypatch: pytest.MonkeyPatch, *lines: str) -> Path:
    """Put programs that answer in the place of Slurm's; return the file with their calls."""
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    (programs / "answer").write_text("".join(f"{line}\n" for line in lines))
    for name in ("squeue", "sacct", "scontrol"):
        answer = f"cat {programs}/answer" if name == "squeue" else "true"
        (programs / name).write_text(f"#!/bin/sh\necho {name} >> {folder}/calls\n{answer}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    return folder / "calls"


def rows(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    """Return the output of ``hpcrun status --json``."""
    capsys.readouterr()
    assert guarded(["status", "--json", *words]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_the_table_has_all_attempts_and_a_filter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.time", lambda: NOW)
    run_of(tmp_path, "good", "finished", 9_958.0)
    run_of(tmp_path, "bad", "failed", 2_000.0)
    # A pipe is as wide as the smallest terminal.
    assert guarded(["status"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines()[:3])) <= 80
    monkeypatch.setenv("COLUMNS", "200")
    assert guarded(["status"]) == 0
    heading, *lines = capsys.readouterr().out.splitlines()
    assert heading.split()[:6] == ["name", "state", "step", "done", "loss", "speed"]
    told = {line.split()[0]: line for line in lines}
    assert re.search(
        r"^good +finished: why good +3/12 +25% +1\.0000 +1\.5k tokens/s ", told["good"]
    )
    assert re.search(r" 42s ago +2 +2 +local$", told["good"])
    assert re.search(r" 2h13m ago +2 +2 +local$", told["bad"])
    assert guarded(["status", "--state", "failed,lost"]) == 0
    shown = capsys.readouterr().out
    assert "bad" in shown
    assert "why good" not in shown
    assert guarded(["status", "--state", "running"]) == 0
    assert capsys.readouterr().out.startswith("hpcrun: no runs are running in ")


CRASH = "1 crash, 0 allowed (restarts.crash)"


@pytest.mark.parametrize(
    ("reason", "shown_as"),
    [
        ("rank 0 on n1: ValueError: 7 at a.py:3", "ValueError: 7 at a.py:3 (rank 0 on n1)"),
        ("rank 12 on n1.site: ScriptFailed: run.sh: exit code 3", "run.sh: exit code 3 (rank 12 on n1.site)"),
        ("rank 0 on n1: ScriptFailed: sh a; b ended with code 1", "sh a; b ended with code 1 (rank 0 on n1)"),
        ("rank 3 on gpu07: RuntimeError: shape mismatch", "RuntimeError: shape mismatch (rank 3 on gpu07)"),
        ("the partition is gone", "the partition is gone"),
    ],
)  # fmt: skip
def test_a_failure_shows_the_message_of_the_program(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    reason: str,
    shown_as: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("one", "two"):
        run = run_of(tmp_path, name, "failed", time.time())
        write_json(run.result, {"state": "failed", "reason": f"{reason}; {CRASH}"})
    # A pipe without the names of the runs.
    assert guarded(["status"]) == 0
    shown = capsys.readouterr().out
    assert f"failed: {shown_as}"[:24] in shown.splitlines()[1]
    assert f"two: failed: {shown_as}; {CRASH}" in shown


def test_the_cause_of_a_failure_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run = run_of(tmp_path, "noisy", "failed", time.time())
    logs = run.attempt_logs(Attempt("2", 0))
    logs.mkdir(parents=True)
    noise = "RuntimeError: CUDA error: an illegal memory access was encountered {}\n"
    lines = (noise.format(number) for number in range(50_000))
    (logs / "rank-00000.log").write_text("".join(lines))
    kept = logs / "cause.json"
    rows(capsys)
    assert json.loads(kept.read_text())["events"] == 2
    write_json(kept, {"events": 2, "cause": "known"})
    assert rows(capsys)[0]["diagnosis"] == "known"
    # The run has gone on, and the new logs show no failure.
    record_event(run, "opened", attempt=Attempt("3", 0))
    assert rows(capsys)[0]["diagnosis"] is None


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--state", "running,dead"], "--state dead: invalid choice; choose from new, pending"),
        (["--watch"], "--watch: needs a terminal that can be redrawn"),
        (["--watch", "--json"], "--watch --json: give one of them"),
    ],
)
def test_bad_options_of_status_get_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    told: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert guarded(["status", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line


def test_a_terminal_gets_the_first_columns_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("TERM", "xterm")
    run = run_of(tmp_path, "good", "finished", 9_958.0)
    write_json(run.result, {"state": "failed", "reason": "größe 模型 " * 9})
    assert guarded(["status"]) == 0
    colored = capsys.readouterr().out
    assert colored.startswith("\x1b[1mname")
    assert "\n\x1b[31mgood" in colored
    monkeypatch.setenv("NO_COLOR", "1")
    assert guarded(["status"]) == 0
    heading, line, *_ = capsys.readouterr().out.splitlines()
    assert heading.split()[:2] == ["name", "state"]
    assert "…" in line
    assert max(len(heading), len(line)) <= 60
    assert guarded(["status", "good"]) == 0
    assert f"good: failed: {'größe 模型 ' * 9}".rstrip() in capsys.readouterr().out


PENDING = "7|PENDING||N/A,{start}|1:00|{reason}|{name}"
ENDED = {"event": "ended", "cause": "preemption", "restart_allowed": True}


@pytest.mark.parametrize(
    ("events", "start", "reason", "says"),
    [
        ((), "N/A", "Priority", "waiting: higher-priority jobs"),
        ((), "{soon}", "Priority", "waiting: higher-priority jobs, starts {clock}"),
        ((), "1000", "Resources", "waiting: for enough free nodes; it is next in line"),
        ((ENDED,), "{soon}", "BeginTime", "requeued after preemption, starts {clock}"),
        (
            (ENDED,),
            "N/A",
            "Priority",
            "requeued after preemption; waiting: higher-priority jobs",
        ),
    ],
)
def test_a_waiting_run_tells_what_for_and_until_when(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    events: tuple[dict[str, Any], ...],
    start: str,
    reason: str,
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    # Noon: a start in ten minutes is on the same day.
    noon = time.mktime((2026, 11, 22, 12, 0, 0, 0, 0, -1))
    monkeypatch.setattr("time.time", lambda: noon)
    soon = str(int(noon + 600))
    run = on_slurm(tmp_path, "waits", *events)
    line = PENDING.format(start=start.format(soon=soon), reason=reason, name="waits")
    squeue_says(tmp_path, monkeypatch, line)
    (row,) = rows(capsys)
    assert (row["state"], row["says"]) == ("pending", says.format(clock="12:10"))
    assert row["restarts"] == ({"preemption": 1} if events else {})
    assert row["directory"] == str(run.path)


def test_the_doctor_explains_a_failure_before_a_cancelled_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    failed = {"event": "ended", "cause": "crash", "reason": "ValueError: bad data"}
    again = {"event": "submitted", "executor": "slurm", "job": "8", "name": "again"}
    cancelled = {"event": "cancelled", "job": "8"}
    on_slurm(tmp_path, "again", {"event": "opened"}, failed, again, cancelled)
    squeue_says(tmp_path, monkeypatch)
    assert rows(capsys)[0]["says"] == "cancelled; `hpcrun resume` continues it"
    assert guarded(["doctor", "again"]) == 1
    assert "ValueError: bad data" in capsys.readouterr().out


def test_a_hundred_runs_on_slurm_take_one_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    base = {"restart": 0, "time": NOW}
    for number in range(100):
        run = create(tmp_path / "runs" / f"r{number}", "x\n", {})
        job = f"9_{number}" if number < 50 else str(1000 + number)
        event = {"event": "submitted", "executor": "slurm", "job": job, "name": "r"}
        append_line(run.events, base | event)
    known = [f"9_{number}|RUNNING||N/A,N/A|1:00|None|r" for number in range(50)]
    known += [f"{1000 + number}|RUNNING||N/A,N/A|1:00|None|r" for number in range(50, 100)]
    calls = squeue_says(tmp_path, monkeypatch, *known)
    assert {row["state"] for row in rows(capsys)} == {"running"}
    assert calls.read_text().split() == ["squeue"]


def test_without_an_answer_of_slurm_the_table_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    on_slurm(tmp_path, "waits")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert guarded(["status"]) == 0
    _heading, line, note = capsys.readouterr().out.splitlines()
    assert re.match(r"waits +waiting; Slurm does not answer now ", line)
    assert note.startswith("hpcrun: the scheduler does not answer")


@pytest.mark.parametrize(
    ("replace", "problem"), [(Path.mkdir, "Is a directory"), (os.mkfifo, "Not a regular file")]
)
def test_a_run_that_cannot_be_read_hides_no_other(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    replace: Callable[[Path], None],
    problem: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    run_of(tmp_path, "good", "finished", 1.0)
    run = run_of(tmp_path, "bad", "finished", 1.0)
    run.events.unlink()
    replace(run.events)
    found = {row["name"]: row for row in rows(capsys)}
    assert found["good"]["state"] == "finished"
    assert found["bad"]["says"].startswith(f"unreadable: {run.events}: {problem}")
    assert guarded(["status"]) == 0


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a run and a sweep of four runs. Run 3 of the sweep is not submitted yet."""
    monkeypatch.chdir(tmp_path)
    run_of(tmp_path, "alone", "finished", 1.0)
    for number, state in enumerate(("finished", "finished", "failed")):
        run_of(tmp_path, f"lrs/00{number}", state, 1.0)
    listed = [SweepRun(f"00{n}", {"optim.lr": 10.0**-n}) for n in range(4)]
    write_sweep(SweepFile(tmp_path / "runs" / "lrs", listed))
    return tmp_path


def test_a_sweep_is_one_line_until_it_is_named(
    sweep: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {row["name"]: row for row in rows(capsys)}
    assert found.keys() == {"alone", "lrs"}
    told = "4 runs: 2 finished, 1 not submitted, 1 failed"
    assert (found["lrs"]["kind"], found["lrs"]["says"]) == ("sweep", told)
    assert found["lrs"]["counts"] == {"finished": 2, "failed": 1, "new": 1}
    assert [row["name"] for row in rows(capsys, "--state", "failed")] == ["lrs"]
    assert guarded(["status", "lrs"]) == 0
    heading, *lines = capsys.readouterr().out.splitlines()
    assert heading.split()[:3] == ["name", "values", "state"]
    assert re.match(r"lrs/000 +lr=1\.0 +finished: why", lines[0])
    assert re.match(r"lrs/003 +lr=0\.001 +not submitted yet", lines[3])
    assert f"lrs: {told}" in lines
    assert [row["name"] for row in rows(capsys, "lrs/001")] == ["lrs/001"]


def test_the_loss_of_a_sweep_stays_at_80_columns(
    sweep: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("train.a_long_key", "optim.betas", "model.a_long_key")
    values: dict[str, Any] = dict.fromkeys(names, "a long value")
    listed = [SweepRun(f"00{n}", {"optim.lr": 10.0**-n, **values}) for n in range(3)]
    (sweep / "runs" / "lrs").rename(sweep / "runs" / "a-name-that-is-rather-long")
    write_sweep(SweepFile(sweep / "runs" / "a-name-that-is-rather-long", listed))
    monkeypatch.setenv("COLUMNS", "80")
    assert guarded(["status", "a-name-that-is-rather-long"]) == 0
    heading, *lines = capsys.readouterr().out.splitlines()
    assert heading.split()[:4] == ["name", "values", "state", "loss"]
    assert all(line.split()[-1] == "1.0000" or "1.0000 " in line for line in lines[:3])
    assert max(map(len, [heading, *lines[:3]])) <= 80


@pytest.mark.parametrize(
    ("text", "problem"),
    [("", "is damaged"), ("[]", "is damaged"), ('{"runs": 3}', "has version None")],
)
def test_a_damaged_sweep_is_told_in_one_line(
    sweep: Path, capsys: pytest.CaptureFixture[str], text: str, problem: str
) -> None:
    (sweep / "runs" / "lrs" / "sweep.json").write_text(text)
    assert [row["name"] for row in rows(capsys)] == ["alone"]
    assert guarded(["status", "lrs"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"sweep.json: {problem}" in line


def test_watch_shows_the_running_runs_of_a_sweep_first(tmp_path: Path) -> None:
    names = [f"{number:03}" for number in range(40)]
    for name in names:
        run = run_of(tmp_path, f"lrs/{name}", "finished", time.time())
    write_sweep(SweepFile(tmp_path / "runs" / "lrs", [SweepRun(n, {"lr": n}) for n in names]))
    run.result.unlink()
    training = subprocess.Popen(["hpcrun", "60"], executable=shutil.which("sleep"))
    job = Attempt(f"pid{training.pid}", 0)
    record_event(run, "submitted", attempt=job, executor="debug")
    screen = Terminal(tmp_path, "status", "--watch", "lrs")
    try:
        screen.read_until(r"(?s)lrs/039 +lr=039 +running.*lrs/000 +lr=000 +finished")
        # Nothing is on Slurm.
        screen.read_until("every 2 s")
        screen.press_ctrl_c()
        assert screen.end() == 0
    finally:
        screen.kill()
        training.kill()
        training.wait()


_ALT, _MAIN = "\x1b[?1049h", "\x1b[?1049l"


def test_watch_redraws_in_place_and_leaves_the_terminal_clean(tmp_path: Path) -> None:
    run = run_of(tmp_path, "good", "finished", time.time())
    screen = Terminal(tmp_path, "status", "--watch")
    try:
        screen.read_until(re.escape(_ALT))
        screen.read_until(r"good +finished: why good")
        screen.read_until("Ctrl-C ends the watching")
        write_json(run.result, {"state": "failed", "reason": "\x1b[2Jevil\n"})
        screen.read_until(r"good +failed: \\x1b\[2Jevil\\n")
        shutil.copytree(run.path, run.path.with_name("newer"))
        screen.read_until(r"newer +failed")
        screen.press_ctrl_c()
        assert screen.end() == 0
    finally:
        screen.kill()
    rest = screen.text
    assert _MAIN in rest
    assert "\x1b[?25h" in rest
    assert "Traceback" not in rest
