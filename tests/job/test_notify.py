"""Notifications reach the command of the user, and never change how a run ends."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from hpcrun.config import Watch, load_resolved
from hpcrun.job import notifying
from hpcrun.job.notifying import Notification, deliver, message, notification_of, start, wait
from hpcrun.run.attempt import Attempt
from hpcrun.run.directory import RunDirectory, create
from hpcrun.run.files import write_json
from hpcrun.run.journal.events import Cause
from hpcrun.run.sweep_file import SweepFile, SweepRun, write_sweep
from hpcrun.slurm.local.job_files import JobStatus
from tests.support import jobs
from tests.support.journal import record_event

FIRST = Attempt("7", 0)
FAILED = Notification("failed", FIRST, "crash", "ValueError: bad \x1b[31mdata", step=12)
MESSAGE: dict[str, Any] = {
    **dict.fromkeys(("run", "name", "event", "cause", "reason", "job", "host"), "x"),
    "text": "a\x00b", "step": 12, "time": 1.5,
}  # fmt: skip


def send(run: RunDirectory, one: Notification) -> None:
    wait(start(run, load_resolved(run.config).watch, one))


@pytest.mark.parametrize(
    ("cause", "restart", "attempts", "name"),
    [
        (Cause.FINISHED, False, 1, "finished"),
        (Cause.CANCELLED, False, 3, "cancelled"),
        (Cause.BAD_INPUT, False, 2, "failed"),
        (Cause.CRASH, False, 1, "failed"),
        (Cause.CRASH, False, 4, "budget-used-up"),
        (Cause.EXHAUSTED, False, 1, "budget-used-up"),
        (Cause.PREEMPTION, True, 1, "requeued"),
    ],
)
def test_every_end_has_one_notification(
    cause: Cause, restart: bool, attempts: int, name: str
) -> None:
    assert notification_of(cause, restart=restart, attempts=attempts) == name


def test_a_command_gets_the_message_and_variables(tmp_path: Path) -> None:
    command = f"cat > {tmp_path}/json; printenv HPCRUN_STEP HPCRUN_TEXT > {tmp_path}/variables"
    assert deliver(command, MESSAGE).wait(60) == 0
    assert json.loads((tmp_path / "json").read_text()) == MESSAGE
    assert (tmp_path / "variables").read_text() == "12\nab\n"


def test_a_command_may_ignore_its_input_and_leave_a_process() -> None:
    content = {**MESSAGE, "lines": ["x" * 300] * 1000}
    assert deliver("sleep 60 & exit 0", content).wait(50) == 0


def test_a_failed_command_is_one_line_without_its_output(
    capfd: pytest.CaptureFixture[str],
) -> None:
    deliver("echo no mail at https://example.org/s3cret; exit 3", MESSAGE).wait(60)
    line = "hpcrun: no notification: the command ended with exit code 3\n"
    assert capfd.readouterr() == (line, "")


def test_a_command_that_hangs_is_killed_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(notifying, "COMMAND_TIMEOUT", 1.0)
    command = f"sleep 300 & echo $! > {tmp_path}/pid; trap '' TERM; wait"
    deliver(command, MESSAGE).wait(60)
    pid = int((tmp_path / "pid").read_text())
    jobs.wait_for(lambda: jobs.has_ended(pid), 30)
    assert "the command ended with exit code 137" in capfd.readouterr().out


def test_a_message_has_no_control_characters(tmp_path: Path) -> None:
    told = json.loads(json.dumps(message(create(tmp_path / "a", "{}\n", {}), FAILED)))
    assert (told["id"], told["event"], told["step"]) == ("a/7-0/failed", "failed", 12)
    assert told["text"] == "a: failed at step 12: ValueError: bad \\x1b[31mdata"


def received(folder: Path) -> list[dict[str, Any]]:
    path = folder / "received"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_only_the_events_asked_for_are_sent(tmp_path: Path) -> None:
    run = create(tmp_path / "a", "{}\n", {})
    watch = Watch(notify=f"cat >> {tmp_path}/received", notify_on=["failed"])
    wait(start(run, watch, FAILED))
    assert start(run, watch, replace(FAILED, name="requeued")) is None
    assert start(run, Watch(), FAILED) is None
    assert [told["id"] for told in received(tmp_path)] == ["a/7-0/failed"]


def submitted(folder: Path, name: str, target: str, **changes: Any) -> RunDirectory:
    settings = {"job.nodes": 1, "job.gpus": 1, "train.steps": 6, "checkpoint.every": 3, **changes}
    return jobs.submit_probe(folder, name, **{"watch.notify": target, **settings})


def test_a_run_notifies_its_used_up_budget(tmp_path: Path) -> None:
    crashing: dict[str, Any] = {
        "model.fault": {"rank": 0, "call": 3},
        "restarts.crash": 1,
        "restarts.same_step": None,
        "watch.notify_on": ["requeued", "budget-used-up"],
    }
    run = submitted(tmp_path, "failing", f"cat >> {tmp_path}/received", **crashing)
    jobs.wait_for_end(run)
    jobs.wait_for(lambda: len(received(tmp_path)) == 2)
    requeued, last = received(tmp_path)
    assert (requeued["event"], last["event"]) == ("requeued", "budget-used-up")
    assert "the data of call 3 is broken" in last["reason"]
    assert last["cause"] == "crash"
    assert "restarts.crash" in last["decision"]


def test_a_command_that_hangs_does_not_hold_up_a_run(tmp_path: Path) -> None:
    run = submitted(tmp_path, "slow", "sleep 600")
    jobs.wait_for_end(run)
    assert jobs.result(run)["state"] == "finished"


def test_only_the_last_end_of_a_sweep_sends(tmp_path: Path) -> None:
    target = {"notify": f"cat >> {tmp_path}/received", "notify_on": ["failed"]}
    text = yaml.safe_dump({"name": "s", "watch": target})
    runs = [create(tmp_path / "s" / name, text, {}) for name in ("000", "001", "002")]
    write_sweep(SweepFile(tmp_path / "s", [SweepRun(run.path.name, {}) for run in runs]))
    here = psutil.Process()
    for run in runs:
        record_event(run, "submitted", attempt=FIRST, executor="local")
        status = JobStatus("7", "RUNNING", 0, here.pid, here.create_time(), [])
        run.job_logs("7").mkdir(parents=True)
        write_json(run.job_logs("7") / "job.json", asdict(status))
    # The runs end in another order than their numbers.
    for run in (runs[2], runs[0], runs[1]):
        state = "failed" if run == runs[1] else "finished"
        write_json(run.result, {"state": state, "time": 1.0})
        send(run, Notification(state, FIRST, "", ""))
        assert bool(received(tmp_path)) is (run == runs[1])
    # Another run that ends at the same time finds all results too.
    send(runs[0], Notification("finished", FIRST, "", ""))
    (told,) = received(tmp_path)
    assert (told["event"], told["name"], told["run"]) == ("failed", "s", str(tmp_path / "s"))
    assert told["text"] == "s: failed: 3 runs: 2 finished, 1 failed"
    assert told["lines"] == ["s/001: failed: "]
    # An end that nobody asked for.
    for run, state in ((runs[0], "cancelled"), (runs[1], "finished")):
        write_json(run.result, {"state": state, "time": 2.0})
    send(runs[0], Notification("cancelled", FIRST, "", ""))
    assert len(received(tmp_path)) == 1
