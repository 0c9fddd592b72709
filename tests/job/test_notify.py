"""Notifications reach a real server, once, and never change how a run ends."""

import json
import os
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from hpcrun.cli.main import guarded
from hpcrun.config import Watch
from hpcrun.job import notifying
from hpcrun.job.notifying import (
    KEY,
    LINE_CHARACTERS,
    LINES,
    DeliveryError,
    Due,
    deliver,
    due,
    message,
    notification_of,
    send,
    start,
    wait,
)
from hpcrun.run.directory import RunDirectory, create
from hpcrun.run.endings import record_failure
from hpcrun.run.events import Attempt, Cause, Event, read_events, record_event
from hpcrun.run.files import append_line
from tests import jobs

FIRST = Attempt("7", 0)
SECRET = "T0/B1/s3cret"
MESSAGE: dict[str, Any] = {
    **dict.fromkeys(("run", "name", "event", "cause", "reason", "job", "cluster", "host"), "x"),
    "text": "a\x00b", "step": 12, "loss": None, "time": 1.5,
}  # fmt: skip


class Receiver:
    """A web server on this host. ``answers``: the status of each answer, 200 after the last."""

    def __init__(self, *answers: int, pause: float = 0.0) -> None:
        self.received: list[dict[str, Any]] = []
        self.answers, self.pause = list(answers), pause
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.received.append(json.loads(body))
                time.sleep(receiver.pause)
                status = receiver.answers.pop(0) if receiver.answers else 200
                self.send_response(status)
                if status == 302:
                    self.send_header("Location", "/elsewhere")
                self.end_headers()

            def do_GET(self) -> None:
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Print nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}/{SECRET}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.server.shutdown()


def new_run(folder: Path, target: str) -> RunDirectory:
    text = yaml.safe_dump({"name": "a", "watch": {"notify": target}})
    run = create(folder / "a", text, {})
    record_event(run, "opened", attempt=FIRST)
    return run


def end(run: RunDirectory, name: str = "failed", attempt: Attempt = FIRST) -> None:
    fields = {KEY: name, "reason": "ValueError: bad \x1b[31mdata"}
    record_event(run, "ended", attempt=attempt, cause="crash", step=12, **fields)


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


def test_a_webhook_gets_the_message_as_json(receiver: Receiver) -> None:
    deliver(receiver.url, MESSAGE, {})
    assert receiver.received == [MESSAGE]


@pytest.mark.parametrize(
    ("answers", "requests", "delivered"),
    [((500,), 2, True), ((500, 503), 2, False), ((404,), 1, False), ((302,), 1, False)],
)
def test_a_webhook_is_asked_again_after_server_errors_only(
    receiver: Receiver,
    monkeypatch: pytest.MonkeyPatch,
    answers: tuple[int, ...],
    requests: int,
    delivered: bool,
) -> None:
    monkeypatch.setattr(notifying, "RETRY_PAUSE", 0.0)
    receiver.answers = list(answers)
    if delivered:
        deliver(receiver.url, MESSAGE, {})
    else:
        with pytest.raises(DeliveryError, match=f"{answers[-1]}|redirects") as caught:
            deliver(receiver.url, MESSAGE, {})
        assert SECRET not in str(caught.value)
    assert len(receiver.received) == requests


def test_a_server_that_does_not_answer_costs_seconds(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifying, "RETRY_PAUSE", 0.0)
    monkeypatch.setattr(notifying, "WEBHOOK_TIMEOUT", 0.2)
    receiver.pause = 60.0
    with pytest.raises(DeliveryError, match="timed out") as caught:
        deliver(receiver.url, MESSAGE, {})
    assert SECRET not in str(caught.value)


def test_a_command_gets_the_message_and_variables(tmp_path: Path) -> None:
    command = f"cat > {tmp_path}/json; printenv HPCRUN_STEP HPCRUN_TEXT > {tmp_path}/variables"
    deliver(command, MESSAGE, dict(os.environ))
    assert json.loads((tmp_path / "json").read_text()) == MESSAGE
    assert (tmp_path / "variables").read_text() == "12\nab\n"


def test_a_command_may_ignore_its_input_and_leave_a_process() -> None:
    deliver("sleep 60 & exit 0", {**MESSAGE, "lines": ["x" * 300] * 1000}, dict(os.environ))


def test_the_last_line_of_a_failed_command_is_reported(tmp_path: Path) -> None:
    with pytest.raises(DeliveryError, match=r"exit code 3: \\x1b\[2Jno mail$"):
        deliver("echo a; printf '\\033[2Jno mail'; exit 3", MESSAGE, dict(os.environ))


def test_a_command_that_hangs_is_killed_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifying, "COMMAND_TIMEOUT", 1.0)
    command = f"sleep 300 & echo $! > {tmp_path}/pid; trap '' TERM; wait"
    with pytest.raises(DeliveryError, match="longer than 1 s"):
        deliver(command, MESSAGE, dict(os.environ))
    pid = int((tmp_path / "pid").read_text())
    jobs.wait_for(lambda: jobs.has_ended(pid), 30)


def test_a_message_holds_the_end_of_the_failed_ranks_log(tmp_path: Path) -> None:
    run = new_run(tmp_path, "true")
    folder = run.attempt_logs(Attempt("7", 0))
    record_failure(folder, 3, ValueError("bad"), 12)
    noise = b"\x1b]0;title\x07 " + b"x" * 1000 + b"\n"
    (folder / "rank-00000.log").write_text("of rank 0\n")
    (folder / "rank-00003.log").write_bytes(noise * 400 + b"of rank 3\n\n")
    append_line(run.metrics, {"step": 11, "loss": 0.5})
    append_line(run.metrics, {"step": 12, "loss": float("nan")})
    end(run)
    (asked,) = due(read_events(run))
    told = json.loads(json.dumps(message(run, asked, "big")))
    assert told["lines"][-1] == "of rank 3"
    assert len(told["lines"]) == LINES
    assert max(map(len, told["lines"])) == LINE_CHARACTERS
    assert "\x1b" not in json.dumps(told["lines"], ensure_ascii=False)
    assert (told["event"], told["step"], told["cluster"]) == ("failed", 12, "big")
    assert told["text"] == "a: failed at step 12: ValueError: bad \\x1b[31mdata"


def outcomes(run: RunDirectory) -> list[str]:
    found = ("notified", "notify-failed")
    return [event.what for event in read_events(run) if event.what in found]


def test_the_next_process_sends_what_a_killed_sender_left(
    tmp_path: Path, receiver: Receiver
) -> None:
    run = new_run(tmp_path, receiver.url)
    end(run)
    receiver.pause = 300.0
    first = start(run)
    assert first is not None
    jobs.wait_for(lambda: bool(receiver.received))
    first.kill()
    first.wait()
    receiver.pause = 0.0
    wait(start(run))
    assert start(run) is None
    assert outcomes(run) == ["notified"]
    assert [told["id"] for told in receiver.received] == ["a/7-0/failed"] * 2
    assert SECRET not in run.events.read_text()


def test_concurrent_senders_send_once(tmp_path: Path, receiver: Receiver) -> None:
    run = new_run(tmp_path, receiver.url)
    end(run)
    end(run, "finished", Attempt("7", 1))
    for sender in [start(run) for _ in range(4)]:
        wait(sender)
    assert sorted(told["event"] for told in receiver.received) == ["failed", "finished"]


def test_a_failed_delivery_is_one_event_without_repetition(tmp_path: Path) -> None:
    run = new_run(tmp_path, f"echo no mail at https://example.org/{SECRET}; false")
    end(run)
    wait(start(run))
    assert start(run) is None
    (failed,) = [event for event in read_events(run) if event.what == "notify-failed"]
    assert failed.fields["reason"].endswith("no mail at https://example.org/***")


def test_an_end_that_no_log_can_take_is_sent_anyway(tmp_path: Path, receiver: Receiver) -> None:
    run = new_run(tmp_path, receiver.url)
    ended = Event("ended", 1.0, FIRST, None, None, {"reason": "no space"})
    send(run, Due("failed", FIRST, ended))
    assert [told["reason"] for told in receiver.received] == ["no space"]


def test_without_a_target_there_is_no_process(tmp_path: Path) -> None:
    run = new_run(tmp_path, "true")
    end(run)
    assert start(run, Watch()) is None


def submitted(folder: Path, name: str, target: str, **changes: Any) -> RunDirectory:
    settings = {"job.nodes": 1, "job.gpus": 1, "train.steps": 6, "checkpoint.every": 3, **changes}
    return jobs.submit_probe(folder, name, **{"watch.notify": target, **settings})


def test_a_run_notifies_its_finish_and_its_used_up_budget(
    tmp_path: Path, receiver: Receiver
) -> None:
    done = submitted(tmp_path, "done", receiver.url)
    fault = {"rank": 0, "call": 3}
    on = ["requeued", "budget-used-up"]
    crashing: dict[str, Any] = {
        "model.fault": fault,
        "restarts.crash": 1,
        "restarts.same_step": None,
    }
    failing = submitted(tmp_path, "failing", receiver.url, **crashing, **{"watch.notify_on": on})
    for run in (done, failing):
        jobs.wait_for_end(run)
    jobs.wait_for(lambda: len(outcomes(done)) == 1 and len(outcomes(failing)) == 2)
    told = {(one["name"], one["event"]): one for one in receiver.received}
    assert set(told) == {
        ("done", "finished"),
        ("failing", "requeued"),
        ("failing", "budget-used-up"),
    }
    assert told["done", "finished"]["step"] == 6
    assert isinstance(told["done", "finished"]["loss"], float)
    last = told["failing", "budget-used-up"]
    assert "the data of call 3 is broken" in last["reason"]
    assert last["cause"] == "crash"
    assert "restarts.crash" in last["decision"]
    assert any("the data of call 3 is broken" in line for line in last["lines"])
    public = [path for path in done.path.rglob("*") if path.is_file() and path != done.config]
    assert [path for path in public if SECRET.encode() in path.read_bytes()] == []


def test_a_target_that_hangs_does_not_hold_up_a_run(tmp_path: Path) -> None:
    run = submitted(tmp_path, "slow", f"echo $$ >> {tmp_path}/pids; sleep 600")
    jobs.wait_for_end(run)
    assert jobs.result(run)["state"] == "finished"
    jobs.wait_for(lambda: bool(outcomes(run)))
    assert outcomes(run) == ["notify-failed"]


def test_the_command_sends_a_test_message(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOOK", receiver.url)
    assert guarded(["notify", "watch.notify=env:HOOK", "name=gpt"]) == 0
    assert "delivered" in capsys.readouterr().out
    (sent,) = receiver.received
    assert (sent["event"], sent["name"]) == ("test", "gpt")
    receiver.answers = [404]
    assert guarded(["notify", f"watch.notify={receiver.url}"]) == 1
    monkeypatch.delenv("HOOK")
    assert guarded(["notify", "watch.notify=env:HOOK"]) == 1
    assert guarded(["notify"]) == 2
    refused, unset, absent = capsys.readouterr().err.splitlines()
    assert "not delivered" in refused
    assert "404" in refused
    assert SECRET not in refused
    assert "the environment variable HOOK is not set here" in unset
    assert "watch.notify: is not set" in absent
