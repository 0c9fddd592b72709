"""A function from Python: its value on each rank, its exception, and what a second call does."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import hpcrun
from hpcrun.api.functions import FunctionRun, RemoteTraceback, function_call
from hpcrun.run.directory import CALLS, RunDirectory
from tests.support.jobs import PATIENCE

HERE: Any = {"executor": "debug", "cpu": True, "nodes": 1, "gpus": 1}
LOCAL: Any = {**HERE, "executor": "local"}


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def add(first: Any, second: Any = 10) -> Any:
    return first + second


class Strange(Exception):
    """An exception that pickle cannot make again."""

    def __init__(self, text: str, number: int) -> None:
        super().__init__(text)


def test_a_call_returns_the_value_of_each_rank(tmp_path: Path) -> None:
    def ranks(start: int) -> tuple[int, int]:
        hpcrun.report(step=1)
        return start, int(os.environ["RANK"])

    run = hpcrun.submit(ranks, 7, **{**LOCAL, "gpus": 2})
    assert isinstance(run, FunctionRun)
    assert (run.name, run.result(PATIENCE), run.results()) == ("ranks", (7, 0), [(7, 0), (7, 1)])
    assert isinstance(hpcrun.open("ranks"), FunctionRun)
    again = hpcrun.submit(ranks, 7, **{**LOCAL, "gpus": 2})
    assert (again.path, again.status()["attempts"]) == (run.path, 1)
    assert hpcrun.submit(ranks, 8, **HERE).path == tmp_path / "runs" / "ranks-2"
    assert run.result() == (7, 0)


PROGRAM = """\
from hpcrun.api.functions import function_call

GLOBAL = {"one", "two", "three"}

class Model:
    def __init__(self, width, kinds=frozenset(["a", "b", "c"])):
        self.width, self.kinds = width, kinds

def train(width, words):
    return Model(width) if width in {"x", "y", "z"} else GLOBAL

SETS = [{"p", "q", "r"}, {"p", "q"}]
for call in [(1, SETS[0]), (1, SETS[1]), (2, SETS[0]), ("one", Model(3)), ("one", Model(4))]:
    print(function_call(train, [call]).digest)
"""


def test_another_process_gives_a_call_the_same_hash(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    found = [
        subprocess.run(
            [sys.executable, "program.py"],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True, text=True, check=True,
        ).stdout.split()
        for seed in ("1", "2")
    ]  # fmt: skip
    assert found[0] == found[1]
    assert len(set(found[0])) == 5


def test_an_object_in_its_own_set_is_an_argument() -> None:
    class Node:
        def __init__(self) -> None:
            self.near = {self}

    assert len(function_call(add, [(Node(),)]).digest) == 12


def test_each_call_of_an_array_is_a_run(tmp_path: Path) -> None:
    class Multiply:
        def __call__(self, first: int, second: int) -> int:
            Path(tmp_path / f"called-{first}").open("x").close()
            if first == 2 and not (tmp_path / "fixed").exists():
                raise ValueError("two")
            return first * second

    given: Any = {**LOCAL, "name": "array", "max_parallel": 2, "overrides": {"restarts.crash": 0}}
    sweep = hpcrun.map_array(Multiply(), [1, 2], iter([3, 4]), **given)
    assert isinstance(sweep, hpcrun.Sweep)
    first, second = sweep
    assert first.result(PATIENCE) == 3
    with pytest.raises(ValueError, match=r"^two$") as failed:
        second.result(PATIENCE)
    assert 'raise ValueError("two")' in str(failed.value.__cause__)
    assert 'raise ValueError("two")' in second.logs()
    (tmp_path / "fixed").touch()
    (tmp_path / "called-2").unlink()
    # The same pickle: the classes of a program get an identity once.
    second.resume()
    assert [run.result(PATIENCE) for run in sweep] == [3, 8]
    assert [path.name for path in sorted((tmp_path / "runs").iterdir())] == ["array"]


def test_an_exception_arrives_with_the_traceback_of_the_rank() -> None:
    def fails(kind: str) -> None:
        if kind == "exit":
            sys.exit(3)
        raise {"os": FileNotFoundError(2, "no", "x"), "strange": Strange("odd", 2)}[kind]

    with pytest.raises(FileNotFoundError) as failed:
        hpcrun.submit(fails, "os", **HERE).result()
    assert isinstance(failed.value.__cause__, RemoteTraceback)
    assert "in fails" in str(failed.value.__cause__)
    with pytest.raises(RuntimeError, match=r"Strange: odd$"):
        hpcrun.submit(fails, "strange", **HERE).result()
    with pytest.raises(
        hpcrun.UserError, match=r"has no value, because it is failed: .*exit code 3"
    ):
        hpcrun.submit(fails, "exit", **HERE).result()


def test_a_value_that_cannot_be_pickled_is_an_exception() -> None:
    with pytest.raises(TypeError, match="cannot pickle"):
        hpcrun.submit(threading.Lock, **HERE).result()


def test_a_cancelled_call_has_no_value() -> None:
    run = hpcrun.submit(time.sleep, 1000, **LOCAL)
    with pytest.raises(TimeoutError):
        run.result(0.1)
    run.cancel(now=True)
    with pytest.raises(hpcrun.UserError, match="sleep: has no value, because it is cancelled"):
        run.result()


def test_a_call_that_was_preempted_begins_again(tmp_path: Path) -> None:
    def waits(folder: str) -> str:
        place = Path(folder) / "started"
        if place.exists():
            return os.environ["HPCRUN_RESTART"]
        place.touch()
        time.sleep(1000)
        return ""

    run = hpcrun.submit(waits, str(tmp_path), **LOCAL)
    deadline = time.monotonic() + PATIENCE
    while not (tmp_path / "started").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    run.preempt()
    assert run.result(PATIENCE) == "1"


def test_a_wrong_call_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    for call, words in (
        (lambda: hpcrun.submit(add, threading.Lock(), **HERE), "add: the function or an argument"),
        (lambda: hpcrun.submit(add, 1, task="x", **HERE), "task=: is not for a function"),
        (lambda: hpcrun.submit(add, 1, sweep={"seed": [1]}, **HERE), "sweep=: is not for"),
        (lambda: hpcrun.submit(add, 1, **{**HERE, "nodes": 0}), "nodes=: job.nodes"),
        (lambda: hpcrun.map_array(add, [1], [2, 3], **LOCAL), "the iterables differ in length"),
        (lambda: hpcrun.map_array(add, [], **LOCAL), "there are no calls"),
        (lambda: hpcrun.map_array(add, [1], command=["x"], **LOCAL), "command=: is not for"),
        (lambda: hpcrun.map_array(add, [1], **{**LOCAL, "gpus": -1}), "gpus=: job.gpus"),
    ):
        with pytest.raises(hpcrun.UserError, match=words) as refused:
            call()  # type: ignore[no-untyped-call]
        assert "\n" not in str(refused.value)
    with pytest.raises(TypeError, match="one positional argument"):
        hpcrun.submit("a.yaml", 3)  # type: ignore[call-overload]
    assert not any(tmp_path.iterdir())


def test_a_failed_submission_keeps_the_calls_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    run = hpcrun.submit(add, 1, name="sum", **HERE)
    before = sorted(path.name for path in (run.path / CALLS).iterdir())

    def refuses(*_: Any, **__: Any) -> None:
        raise hpcrun.UserError("the scheduler refuses")

    monkeypatch.setattr("hpcrun.api.submission.sending.submit_local", refuses)
    with pytest.raises(hpcrun.UserError, match="the scheduler refuses"):
        hpcrun.map_array(add, [1], name="many", **LOCAL)
    with pytest.raises(hpcrun.UserError, match="is a run of another config"):
        hpcrun.submit(add, 2, name="sum", **LOCAL)
    assert sorted(path.name for path in (run.path / CALLS).iterdir()) == before
    assert not RunDirectory(run.path.parent / "many").path.exists()
