"""The run object, and the refusals of a submission from Python."""

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

import hpcrun
from hpcrun.api.submission import here as debug
from hpcrun.ranks.signals import end_helpers
from hpcrun.run import directory
from hpcrun.run.attempt import Attempt
from hpcrun.run.directory import RunDirectory
from tests.support.journal import read_events, record_event


@pytest.fixture
def made(tmp_path: Path) -> RunDirectory:
    """A run that no job has had."""
    return directory.create(tmp_path / "runs" / "one", "{}\n", {"created": 1.0})


def test_a_name_and_a_path_open_the_same_run(
    made: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for run in (
        hpcrun.open("one"),
        hpcrun.open("runs/one"),
        hpcrun.open(made.path),
        hpcrun.open("one", runs_dir=tmp_path / "runs"),
    ):
        assert (run.name, run.path) == ("one", made.path)
        assert repr(run) == f"<hpcrun.Run {str(made.path)!r}>"
        assert Path(run) == made.path
    with pytest.raises(hpcrun.UserError, match=r"ono: no such run in .*; did you mean one"):
        hpcrun.open("ono")


def test_a_run_without_a_job_has_no_result_or_log(made: RunDirectory) -> None:
    run = hpcrun.open(made.path)
    assert run.status()["state"] == run.wait(timeout=1) == "new"
    assert (run.metrics(), run.checkpoints()) == ([], [])
    for call in (run.result, run.logs, run.cancel, run.preempt):
        with pytest.raises(hpcrun.UserError, match=r"^one: [^\n]*$"):
            call()


def test_a_log_has_control_characters_as_escapes(made: RunDirectory) -> None:
    attempt = Attempt("7", 0)
    record_event(made, "opened", attempt=attempt)
    run = hpcrun.open(made.path)
    logs = made.attempt_logs(attempt)
    logs.mkdir(parents=True)
    (logs / "rank-00000.log").write_bytes(b"a\x1b[2J\n\n10%\r20%\nb")
    (logs / "rank-00001.log").write_bytes(b"")
    assert run.logs() == "a\\x1b[2J\n\n… 20%\nb\n"
    assert run.logs(rank=1) == ""
    for rank in (2, -1, "all", True):
        with pytest.raises(hpcrun.UserError, match=r"^rank="):
            run.logs(rank=rank)  # type: ignore[arg-type]


def test_metrics_are_whole_lines(made: RunDirectory) -> None:
    lines = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": None}]
    made.metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines) + '{"step": 3')
    assert hpcrun.open(made.path).metrics() == lines


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        ({"config": "gpt.yml"}, "gpt.yml: no such file"),
        ({"overrides": {"train.step": 5}}, "overrides=: train.step: unknown key"),
        ({"overrides": {"train.steps": "many"}}, "overrides=: train.steps: "),
        ({"overrides": {"": 1}}, "overrides=: '' is not a key"),
        ({"overrides": "train.steps=5"}, "overrides=: give a dict"),
        ({"nodes": 0}, "nodes=: job.nodes: "),
        ({"overrides": {"train.init_from": "no/w"}}, r"train\.init_from: no/w does not exist in /"),
        ({"overrides": {"train.init_from": "/no"}}, r"train\.init_from: /no does not exist in /"),
        ({"task": "nowhere:Task"}, "task=: task: "),
        ({"command": "python train.py"}, "command=: give a list of words: command=.'python', 'tr"),
        ({"command": []}, "command=: has no words"),
        ({"executor": "cloud"}, "executor=: job.executor: "),
    ],
)
def test_a_wrong_argument_is_one_line_and_leaves_nothing(
    wanted: dict[str, Any], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(hpcrun.UserError, match=f"^{told}") as refused:
        hpcrun.submit(**{"executor": "local", "cpu": True, **wanted})
    assert "\n" not in str(refused.value)
    assert not any(tmp_path.iterdir())


def test_an_unreadable_file_is_a_refusal(made: RunDirectory) -> None:
    made.metrics.mkdir()
    with pytest.raises(hpcrun.UserError, match=r"metrics.jsonl: Is a directory; check its owner"):
        hpcrun.open(made.path).metrics()


def test_a_thread_submits_a_script_and_submits_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    results: list[Any] = []

    def work() -> None:
        for _ in range(2):
            run = hpcrun.submit(
                command=["echo", "hello"], name="hello", executor="local", cpu=True, nodes=1, gpus=1
            )
            results.append((run.wait(), run.result()["state"], run.status()["attempts"]))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert results == [("finished", "finished", 1)] * 2
    assert "hello\n" in hpcrun.open("hello").logs()


def test_debug_trains_in_this_process_and_leaves_its_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLURM_MEM_PER_NODE", "7")
    before = dict(os.environ)
    run = hpcrun.submit(command=["true"], name="here", executor="debug", cpu=True, nodes=1, gpus=1)
    assert os.environ == before
    assert run.status()["state"] == "finished"


def test_two_debug_attempts_in_one_process_are_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["test", "-e", str(tmp_path / "there")]
    run = hpcrun.submit(command=command, name="two", executor="debug", cpu=True, nodes=1, gpus=1)
    assert run.status()["state"] == "failed"
    (tmp_path / "there").touch()
    assert run.resume().status()["state"] == "finished"
    events = read_events(RunDirectory(run.path))
    own = f"pid{os.getpid()}"
    for what in ("submitted", "opened", "ended"):
        jobs = [event.attempt.job for event in events if event.tag == what and event.attempt]
        assert jobs == [own, f"{own}-2"], what


def test_a_debug_run_leaves_the_handlers_of_signals(
    made: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train_here(_run: Path) -> int:
        end_helpers()
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        return 1

    def handler(_number: int, _frame: object) -> None: ...

    monkeypatch.setattr("hpcrun.worker.train_here", train_here)
    first, second = signal.signal(signal.SIGCHLD, handler), signal.getsignal(signal.SIGUSR1)
    try:
        assert debug.run_here(made) == 1
        assert signal.getsignal(signal.SIGCHLD) is handler
        assert signal.getsignal(signal.SIGUSR1) is second
    finally:
        signal.signal(signal.SIGCHLD, first)
        signal.signal(signal.SIGUSR1, second)
