"""The meaning of a script's end for its rank."""

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpcrun.diagnose.causes import first_cause
from hpcrun.job.finalize import finalize
from hpcrun.job.policy import Budgets
from hpcrun.ranks.distributed import DistributedConfig
from hpcrun.ranks.script import run as running
from hpcrun.ranks.script.end import ProgressWatch, ScriptEnd, note_stop
from hpcrun.ranks.script.run import ScriptTerms, rank_code, run_script
from hpcrun.ranks.script.watch import ScriptWatch, code_of_all
from hpcrun.ranks.signals import StopFlag, StopReason
from hpcrun.run import record as owner
from hpcrun.run.attempt import Attempt
from hpcrun.run.directory import RunDirectory, create
from hpcrun.run.endings import HeardStop, last_output, record_heard_stop
from hpcrun.run.failures.script_log import ScriptError, script_error
from hpcrun.run.journal.events import Cause
from hpcrun.run.record import claim
from hpcrun.run.reports import ScriptProgress, publish
from tests.support import jobs
from tests.support.journal import read_events, record_event

FIRST = Attempt("7", 0)


def watch(
    child: "subprocess.Popen[bytes]",
    run: RunDirectory,
    flag: StopFlag,
    rank: int = 0,
    **limits: float,
) -> ScriptWatch:
    """Watch ``child`` as the script of one of two ranks."""
    progress, config = ProgressWatch(run, FIRST, 0), DistributedConfig(rank=rank, world_size=2)
    return ScriptWatch(child, run, FIRST, flag, config, signal.SIGUSR2, progress, **limits)


def test_a_script_that_ends_well_on_a_late_signal_stopped(tmp_path: Path, flag: StopFlag) -> None:
    run = create(tmp_path / "a", "{}\n", {})
    with subprocess.Popen(["true"]) as child:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR2)).start()
        assert watch(child, run, flag, late_signal=60.0).wait(0.0) == 0
    assert flag.reason is StopReason.WARNING


@pytest.mark.parametrize("rank", [0, 1])
def test_a_script_ends_if_another_process_owns_the_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    rank: int,
) -> None:
    run, attempt = create(tmp_path / "a", "{}\n", {}), Attempt("7", 0)
    claim(run, attempt)

    def taken_over() -> None:
        monkeypatch.setattr(owner, "INCARNATION", "another")
        claim(run, attempt)

    with subprocess.Popen(["sleep", "60"]) as child:
        watched = watch(child, run, StopFlag(), rank, owner_every=0.1)
        timer = threading.Timer(1.5, taken_over)
        timer.start()
        assert watched.wait(0.0) == -signal.SIGKILL
        timer.join()
    assert "hpcrun: 7-0 (rank 0 on " in capfd.readouterr().err


@pytest.mark.parametrize(("code", "ours"), [(0, 0), (1, 1), (2, 1), (74, 1), (143, 143)])
def test_a_programs_exit_codes_are_not_taken_for_ours(code: int, ours: int) -> None:
    assert rank_code(code) == ours


def test_a_failed_end_has_its_own_message_or_its_code() -> None:
    raised = ScriptError("errors.Broken", "bad sample", "/me/a.py:3", last_line="x")
    failure = ScriptEnd(["python", "a.py"], 1, raised).failure(0, 7)
    assert (failure.kind, failure.message) == ("Broken", "bad sample")
    assert (failure.where, failure.step) == ("/me/a.py:3", 7)
    # A thread of gloo may abort the interpreter at its exit.
    assert ScriptEnd(["a.py"], -6, raised).kind == "Broken"
    assert (
        ScriptEnd(["a.py"], -9, raised).message == "a.py was killed by SIGKILL: Broken: bad sample"
    )
    launched = ScriptEnd(["a.py"], 1, replace(raised, rank=3, code=1))
    assert launched.message == "bad sample (rank 3 of the launcher)"
    told = ScriptEnd(["a.sh"], 3, ScriptError(last_line="epoch 7"))
    assert told.kind == "ScriptFailed"
    assert told.message == "a.sh ended with exit code 3; its log ends with: epoch 7"
    assert ScriptEnd(["a"], -9).message == "a was killed by SIGKILL"
    # A shell's exit code after a program that it started was killed.
    assert ScriptEnd(["sh"], 137).message == (
        "sh ended with exit code 137: its program was killed by SIGKILL"
    )
    assert ScriptEnd(["sh"], 255).message == "sh ended with exit code 255"


@pytest.mark.parametrize(
    ("words", "log", "line"),
    [
        ("python t.py", "loss 2\nno data in /x\n", "exit code 1 after 'no data in /x'"),
        ("python3 -u t.py", "no data\n", "exit code 1 after 'no data'"),
        ("python t.py", "Connection refused\n", ""),  # a server may answer later
        ("python t.py", "Traceback (most recent call last):\nE: a\n" + "x\n" * 40 + "bad\n", ""),
        ("bash t.sh", "no data\n", ""),
        ("pip-made nb", "no notebook\n", "exit code 1 after 'no notebook'"),
        ("pip-made-long nb", "no notebook\n", "exit code 1 after 'no notebook'"),
        ("torchrun t.py", "no data\n", ""),  # stands for any of its ranks
        ("python t.py", "", ""),
        ("python t.py", "hpcrun: WARNING: n1: no GPU driver\n", ""),
    ],
)
def test_a_python_program_that_ends_itself_twice_fails_equally(
    words: str, log: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for name, first in (
        ("pip-made", "#!/e/bin/python3.11\n"),
        ("pip-made-long", '#!/bin/sh\n\'\'\'exec\' "/e f/bin/python" "$0" "$@"\n'),
        ("torchrun", "#!/usr/bin/env python3\n"),
    ):
        (tmp_path / name).write_text(first)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "log").write_text(log)
    end = ScriptEnd(words.split(), 1, script_error(tmp_path / "log", 1))
    found = first_cause([end.failure(0, None)], [])
    assert found is not None
    assert found.failure == line
    assert not found.bad_input


@pytest.mark.parametrize(
    ("code", "saved", "facts"),
    [
        (-15, None, {"committed": False, "exit_code": -15, "killed": True}),
        (138, None, {"committed": False, "exit_code": 138, "killed": True}),
        (0, None, {"committed": False, "exit_code": 0}),
        (75, None, {"committed": True, "exit_code": 75}),
        (0, 40, {"committed": True, "exit_code": 0}),
    ],
)
def test_a_stop_is_committed_only_if_the_script_says_so(
    tmp_path: Path, code: int, saved: int | None, facts: dict[str, object]
) -> None:
    run = create(tmp_path / "a", "{}\n", {})
    note_stop(run, FIRST, StopReason.WARNING, code, saved)
    (event,) = read_events(run)
    assert (event.tag, event.cause, event.step, event.own) == (
        "stopped",
        "warning",
        saved,
        facts,
    )


def test_the_program_that_outlives_its_wrapper_gives_the_exit_code() -> None:
    assert code_of_all(-15, [0, -15]) == 0
    assert code_of_all(-15, [0, 75]) == 75
    assert code_of_all(-12, [-12]) == -12
    assert code_of_all(143, []) == 143


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stop_that_any_rank_heard_is_no_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: StopFlag, rank: int
) -> None:
    """The script agrees on the signal and ends well on all ranks before the other rank receives it."""
    run = create(tmp_path / "a", "{}\n", {})
    record_event(run, "opened", attempt=FIRST, script=True)

    def hear_and_watch(*given: Any, **named: Any) -> ScriptWatch:
        """Receive the signal after the script has started."""
        signal.raise_signal(signal.SIGUSR2)
        return ScriptWatch(*given, **named)

    # The local cluster itself has sent the signal to the script.
    config = DistributedConfig(rank=rank, world_size=2, launch_method="local")
    monkeypatch.setattr(running, "meet_rank_zero", lambda *_: config)
    monkeypatch.setattr(running, "ScriptWatch", hear_and_watch)
    assert run_script(["true"], run, FIRST, config, flag, ScriptTerms(5.0)) == 0
    classification = finalize(run, FIRST, 0, Budgets(script=True))
    assert (classification.cause, classification.decision.restart) == (Cause.PREEMPTION, True)
    assert classification.line == "the warning signal: the script ended with exit code 0"
    assert not run.result.exists()
    (stopped,) = jobs.events(run, "stopped")
    assert (stopped.cause, stopped.committed) == ("warning", False)


@pytest.mark.parametrize(
    ("reported", "zero", "cause", "restart"),
    [
        ({}, "unfinished", Cause.PREEMPTION, True),
        ({"done": True}, "unfinished", Cause.FINISHED, False),
        ({}, "finished", Cause.FINISHED, False),
        # A restart would begin at step 0.
        ({"unsaved": True}, "unfinished", Cause.PREEMPTION, False),
        ({"unsaved": True, "saved": 4}, "unfinished", Cause.PREEMPTION, True),
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_exit_code_0_after_a_signal(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    flag: StopFlag,
    reported: dict[str, Any],
    zero: str,
    cause: Cause,
    restart: bool,
    rank: int,
) -> None:
    run = create(tmp_path / "a", "{}\n", {})
    record_event(run, "opened", attempt=FIRST, script=True)
    said = {"done": True} if "done" in reported else {"step": 5} if reported else {}
    if "saved" in reported:
        said["saved"] = reported["saved"]
    script = (
        f"import os, signal, hpcrun; hpcrun.report(**{said}); os.kill(os.getppid(), signal.SIGUSR2)"
    )
    config = DistributedConfig(rank=rank, world_size=2, launch_method="local")
    monkeypatch.setattr(running, "meet_rank_zero", lambda *_: config)
    terms = ScriptTerms(5.0, zero_finishes=zero == "finished")
    command = [sys.executable, "-c", script]
    assert run_script(command, run, FIRST, config, flag, terms) == 0
    if rank and said:
        # The script of rank 0 has reported the same.
        publish(run.attempt_logs(FIRST), ScriptProgress(**said))
        if "saved" in said:
            record_event(run, "saved", attempt=FIRST, step=4)
    ended = finalize(run, FIRST, 0, Budgets(script=True))
    assert (ended.cause, ended.decision.restart) == (cause, restart), ended


def test_the_unfinished_work_of_one_rank_counts(tmp_path: Path) -> None:
    run = create(tmp_path / "a", "{}\n", {})
    record_event(run, "opened", attempt=FIRST, script=True)
    note_stop(run, FIRST, StopReason.WARNING, 0, None, done=True)
    logs = run.attempt_logs(Attempt("7", 0))
    record_heard_stop(logs, 1, HeardStop("warning", -12))
    record_heard_stop(logs, 2, HeardStop("warning", 0, done=True))
    assert finalize(run, FIRST, 0, Budgets(script=True)).cause is Cause.PREEMPTION


def test_rank_0_alone_reports_the_end(tmp_path: Path) -> None:
    run = create(tmp_path / "a", "{}\n", {})
    record_event(run, "opened", attempt=FIRST, script=True)
    note_stop(run, FIRST, StopReason.WARNING, 0, None, done=True)
    record_heard_stop(run.attempt_logs(Attempt("7", 0)), 1, HeardStop("warning", 0))
    # The scheduler killed a rank that still worked.
    assert finalize(run, FIRST, 137, Budgets(script=True)).cause is Cause.PREEMPTION
    assert finalize(run, FIRST, 0, Budgets(script=True)).cause is Cause.FINISHED


def test_a_script_without_output_is_a_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: StopFlag
) -> None:
    run = create(tmp_path / "a", "{}\n", {})
    record_event(run, "opened", attempt=FIRST, script=True)
    logs = run.attempt_logs(Attempt("7", 0))
    logs.mkdir(parents=True)
    log = logs / "rank-00001.log"
    log.touch()
    # Output of another rank, and reported steps, are signs of life.
    script = (
        "import time, hpcrun, pathlib\n"
        f"for n in range(2): time.sleep(2); pathlib.Path({str(log)!r}).write_text('x')\n"
        "for n in range(2): time.sleep(2); hpcrun.report(n)\n"
        "time.sleep(600)"
    )
    config = DistributedConfig(launch_method="local")
    monkeypatch.setattr(running, "meet_rank_zero", lambda *_: config)
    began = time.monotonic()
    # On a busy machine the start of Python takes seconds.
    terms = ScriptTerms(5.0, silent_after=6.0)
    assert run_script([sys.executable, "-c", script], run, FIRST, config, flag, terms) == 137
    assert time.monotonic() - began > 12
    ended = finalize(run, FIRST, 137, Budgets(script=True))
    assert (ended.cause, ended.decision.restart) == (Cause.HANG, True)
    assert ended.line == "no rank printed anything for 6 s (job.silent_after)"
    assert last_output(logs) == log.stat().st_mtime
