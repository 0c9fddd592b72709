"""The choice among strategies: the order, failures, the time limit, and a cancellation in between."""

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from hpcrun.config import Config
from hpcrun.ports.strategies import AttemptEnd, Start, choose, next_start
from hpcrun.run.attempt import Attempt
from hpcrun.run.journal.events import Cause
from hpcrun.run.journal.state import State
from tests.support.add_ons import install

TEXT = """
import time
from hpcrun.ports import Start
def none(end): return None
def step(end): return Start("step", f"{end.cause.value} of {end.attempt.owner}")
def fails(end): raise RuntimeError("out of ideas")
def exits(end): raise SystemExit(3)
def wrong(end): return "requeue"
def sleeps(end):
    while not end.state.wakes.wait(1): pass
"""
NAMES = ("none", "step", "fails", "exits", "wrong", "sleeps")


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    points = {"hpcrun.strategies": {name: f"of_a_site:{name}" for name in NAMES}}
    monkeypatch.syspath_prepend(install(tmp_path / "site", "of-a-site", points, of_a_site=TEXT))
    return []


def end(state: object = None) -> AttemptEnd:
    attempt = Attempt("7", 0)
    return AttemptEnd(Path("run"), state or State(()), attempt, Cause.HANG, "", Config())  # type: ignore[arg-type]


def chosen(said: list[str], *names: str, cancelled: bool = False) -> Start | None:
    return choose(names, end(), said.append, lambda: cancelled)


def test_the_first_answer_counts(said: list[str]) -> None:
    assert chosen(said, "none", "step", "fails") == Start("step", "hang of 7-0")
    assert said == ["the strategy step chooses step: hang of 7-0"]
    assert chosen(said, "none") is None


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("fails", "fails: RuntimeError: out of ideas"),
        ("exits", "exits: SystemExit: 3"),
        ("wrong", "wrong: its answer is no Start: 'requeue'"),
        ("absent", "absent: no such strategy"),
    ],
)
def test_a_failing_strategy_is_passed_over(said: list[str], name: str, line: str) -> None:
    assert chosen(said, name, "step") == Start("step", "hang of 7-0")
    assert said[0].startswith(f"restarts.strategies: {line}")
    assert "passed over" in said[0]


def test_a_strategy_without_an_answer_is_passed_over(said: list[str]) -> None:
    class Sleeping:
        wakes = threading.Event()

    found = choose(["sleeps"], end(Sleeping), said.append, lambda: False, seconds=0.01)
    Sleeping.wakes.set()
    assert found is None
    assert said == ["restarts.strategies: sleeps: no answer within 0.01 s; it is passed over"]


def test_a_cancelled_run_asks_no_further_strategy(said: list[str]) -> None:
    assert chosen(said, "none", "step", cancelled=True) is None
    assert chosen(said, "step", cancelled=True) is None
    assert said == []


@pytest.mark.parametrize("names", [[], ["none"], ["in-place", "step"]])
def test_hpcrun_answers_if_no_other_strategy_does(said: list[str], names: list[str]) -> None:
    config = Config.model_validate({"restarts": {"in_place": False, "strategies": names}})
    asked = replace(end(), config=config)
    wanted = Start("requeue", "restarts.in_place is false")
    assert next_start(asked, said.append, lambda: False) == wanted
    # The start of hpcrun's own strategy looks for a cancellation itself.
    assert next_start(asked, said.append, lambda: True) == (None if names else wanted)
