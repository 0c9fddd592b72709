"""An end that cannot be recorded still leads to a decision."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from hpcrun.config import Config, to_yaml
from hpcrun.job import ending
from hpcrun.job.opening import open_attempt
from hpcrun.job.policy import Budgets, Clock
from hpcrun.job.unrecorded import decide_unrecorded
from hpcrun.run.directory import RunDirectory, create
from hpcrun.run.events import Attempt, read_events, record_event
from hpcrun.run.files import write_json

FIRST = Attempt("7", 0)
CANCELLED = "slurmstepd-n1: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-21T19:48:15 ***"


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    config = Config.model_validate({"train": {"batch_size": 64}})
    run = create(tmp_path / "a", to_yaml(config), {})
    run.logs.mkdir(exist_ok=True)
    (run.logs / "batch-7.log").write_text("hpcrun: attempt 7-0 on n1\n")
    open_attempt(run, FIRST, Budgets())
    return run


def test_a_crash_is_requeued_within_the_budget(run: RunDirectory) -> None:
    assert decide_unrecorded(run, FIRST, 1, None).code is None
    for restart in range(3):
        attempt = Attempt("7", restart)
        record_event(run, "opened", attempt=attempt)
        record_event(run, "started", attempt=attempt, step=0)
        record_event(run, "ended", attempt=attempt, cause="crash", step=restart)
    record_event(run, "opened", attempt=Attempt("7", 3))
    last = decide_unrecorded(run, Attempt("7", 3), 137, None)
    assert (last.code, "restarts." in last.reason) == (137, True)


def test_what_is_final_stays_final(run: RunDirectory) -> None:
    assert decide_unrecorded(run, FIRST, 2, None).code == 2
    assert decide_unrecorded(run, FIRST, 74, None).code == 74
    # The exit code of a set-up line has no meaning.
    assert decide_unrecorded(run, FIRST, 2, "module load x").code is None
    with (run.logs / "batch-7.log").open("a") as log:
        log.write(CANCELLED)
    assert decide_unrecorded(run, FIRST, 143, None).code == 143
    write_json(run.result, {"state": "finished"})
    record_event(run, "finished", attempt=FIRST)
    (run.logs / "batch-7.log").unlink()
    assert decide_unrecorded(run, FIRST, 1, None).code == 0


def test_a_folder_that_never_can_be_written_ends_the_run(run: RunDirectory) -> None:
    assert decide_unrecorded(run, Attempt("7", 1), 1, None).code is None
    given_up = decide_unrecorded(run, Attempt("7", 3), 1, None)
    assert (given_up.code, "free some space" in given_up.reason) == (1, True)


def stale(*_: object) -> NoReturn:
    """Fail like a file system that has lost the folder."""
    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))


def test_a_log_that_cannot_be_read_does_not_count_as_starts_that_wrote_nothing(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run with many preemptions has a high number of starts, and each of them has worked."""
    monkeypatch.setattr("hpcrun.job.unrecorded.read_events", stale)
    assert decide_unrecorded(run, Attempt("7", 5), 1, None).code is None


def test_a_result_that_cannot_be_read_leaves_the_events(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    record_event(run, "finished", attempt=FIRST)
    monkeypatch.setattr("hpcrun.job.unrecorded.read_json", stale)
    assert decide_unrecorded(run, FIRST, 1, None).code == 0


@pytest.mark.parametrize("name", ["is_unfinished", "read_heard_stops"])
def test_a_log_folder_that_cannot_be_read_leaves_the_job_to_start_again(
    run: RunDirectory, unwritable: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(f"hpcrun.job.unrecorded.{name}", stale)
    clock = Clock(now=lambda: 0.0, sleep=lambda _: None)
    assert ending.conclude(run, FIRST, 137, clock=clock) == 0
    assert "requeue 7" in unwritable.read_text().splitlines()


@pytest.fixture
def unwritable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Programs of a Slurm that requeues, and a disk that has no space left for a line."""
    calls = tmp_path / "calls"
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(
        f'#!/bin/bash\necho "$*" >> {calls}\n'
        "[ $1 = show ] && echo 'JobId=7 JobState=RUNNING Restarts=0 '\ntrue\n"
    )
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "events.jsonl")

    monkeypatch.setattr("hpcrun.run.events.append_line", full)
    return calls


def test_the_job_is_requeued_though_nothing_can_be_written(
    run: RunDirectory, unwritable: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    waits: list[float] = []
    clock = Clock(now=lambda: 0.0, sleep=waits.append)
    assert ending.conclude(run, FIRST, 137, clock=clock) == 0
    assert "requeue 7" in unwritable.read_text().splitlines()
    assert len(waits) == 2
    assert [event.what for event in read_events(run)] == ["opened"]
    assert "the end of 7-0 cannot be recorded: [Errno 28]" in capsys.readouterr().err
