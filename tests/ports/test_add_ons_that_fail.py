"""Sinks and checks of other packages that fail: the run goes on, and one line says what failed."""

import io
import json
from pathlib import Path

import pytest

from hpcrun.config import Config
from hpcrun.errors import UserError
from hpcrun.network.agent import Agent
from hpcrun.network.probes import added_probe
from hpcrun.ports.node_checks import NodeCheck
from hpcrun.run.directory import RunDirectory
from hpcrun.run.files import read_lines
from hpcrun.train.metrics.sinks import build_sinks
from tests.support.add_ons import install

TEXT = """
from hpcrun import UserError
from hpcrun.ports import Answer, NodeCheck, Sink, node_check

class Refuses(Sink):
    def __init__(self, training):
        raise UserError(f"no account for {training.config['name']}; log in")

class Unreachable(Sink):
    def __init__(self, training):
        raise ConnectionError("no route to host")

class Full(Sink):
    def __init__(self, training):
        self.training = training
    def write(self, line):
        raise ValueError("no room")

@node_check(seconds=3, hardware=True)
def half(needs):
    yield Answer("pass", "so far")
    raise RuntimeError("no licence")

def plain(needs):
    yield Answer("pass", f"{needs.gpus} GPUs")

nothing = NodeCheck(None)
"""
SINKS = {"refuses": "Refuses", "unreachable": "Unreachable", "full": "Full"}
CHECKS = ("half", "plain", "nothing", "space")


@pytest.fixture(autouse=True)
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points = {
        "hpcrun.sinks": {name: f"failing:{value}" for name, value in SINKS.items()},
        "hpcrun.node_checks": {name: f"failing:{name}" for name in CHECKS},
    }
    monkeypatch.syspath_prepend(install(tmp_path / "site", "of-a-site", points, failing=TEXT))


def written(folder: Path, *names: str) -> RunDirectory:
    """Write a line to the sinks ``names`` of a run, and return the run."""
    run = RunDirectory(folder / "run")
    run.path.mkdir()
    config = Config.model_validate({"name": "x", "watch": {"sinks": [*names]}})
    sinks = build_sinks(run, config, start=3)
    sinks.write({"step": 4, "loss": 1.0})
    sinks.write({"step": 5, "loss": 1.0})
    sinks.close()
    return run


def test_a_failing_sink_costs_its_lines_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = written(tmp_path, "unreachable", "full")
    assert [line["step"] for line in read_lines(run.metrics)] == [4, 5]
    assert capsys.readouterr().err.splitlines() == [
        "hpcrun: watch.sinks: unreachable: ConnectionError: no route to host; the training continues "
        "without it",
        "hpcrun: cannot write Full: no room; the training continues",
    ]


def test_a_sink_may_refuse_the_start(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no account for x; log in"):
        written(tmp_path, "refuses")


def answers(check: str) -> list[dict[str, str]]:
    """Return the records of the check ``check`` of an agent."""
    out = io.StringIO()
    arguments = {"check": check, "needs": {"gpus": 2}}
    Agent("n1", out).obey({"number": 1, "do": "added", "arguments": arguments})
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    return [line["part"] for line in lines if "part" in line]


def test_a_check_that_fails_says_nothing_about_its_node() -> None:
    first, second = answers("half")
    assert (first["status"], second["status"]) == ("pass", "unknown")
    assert second["words"] == "the check itself failed: RuntimeError: no licence"
    (missing,) = answers("absent")
    assert missing["status"] == "unknown"
    assert "no such check of nodes" in missing["words"]


def test_a_check_has_its_limits() -> None:
    half = added_probe("half")
    assert (half.name, half.seconds, half.hardware) == ("half", 3, True)
    assert answers("plain")[0]["words"] == "2 GPUs"
    assert added_probe("plain").seconds == NodeCheck(len).seconds


@pytest.mark.parametrize(
    ("name", "line"), [("space", "is a check of hpcrun"), ("nothing", "is no function")]
)
def test_a_check_that_cannot_run_is_refused(name: str, line: str) -> None:
    with pytest.raises(UserError, match=line):
        added_probe(name)
