"""A node that does not answer in time is asked once more before it counts as unfit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from hpcrun.network.preflight.agent import Child
from hpcrun.network.preflight.checks import JobNeeds, PreflightFacts
from hpcrun.network.preflight.report import failures, results, unfit
from hpcrun.network.preflight.start import check_twice
from tests.network.preflight.nodes import told

LOST = "srun: error: Task launch for StepId=7.0 failed on node n3: Communication connection failure"


class Agents:
    """Agents in this process: each of ``nodes`` answers immediately, but those in ``silent`` never."""

    def __init__(self, nodes: Sequence[str], silent: Sequence[str], words: str = "") -> None:
        self.nodes, self._words = list(nodes), words
        self._living = [node for node in nodes if node not in silent]
        self._answers: list[dict[str, Any]] = [
            {"node": node, "type": "hello"} for node in self._living
        ]
        self.closed = False

    def tell(self, order: Mapping[str, Any]) -> None:
        for node in self._living:
            if order["type"] == "clock":
                clock = {"type": "clock", "number": order["number"], "time": time.time()}
                self._answers.append({"node": node, **clock})
                continue
            if order["type"] == "look":
                fact = {"type": "fact", "section": "versions", "value": {"python": "3.11"}}
                self._answers.append({"node": node, **fact})
            self._answers.append({"node": node, "type": "done", "of": order["type"]})

    def hear(self, timeout: float) -> dict[str, Any] | None:
        return self._answers.pop(0) if self._answers else None

    def words(self) -> str:
        return self._words

    def close(self) -> None:
        self.closed = True


def starts(*rounds: tuple[Sequence[str], str]) -> tuple[list[Agents], Callable[..., Agents]]:
    """Return a list of the fleets, and the function that starts the next fleet.

    Each round names the nodes that are silent in it, and the words of srun.
    """
    begun: list[Agents] = []

    def begin(nodes: Sequence[str]) -> Agents:
        assert all(agents.closed for agents in begun)
        silent, words = rounds[len(begun)]
        begun.append(Agents(nodes, silent, words))
        return begun[-1]

    return begun, begin


def check(begin: Callable[..., Agents], count: int = 3) -> PreflightFacts:
    nodes = [f"n{index}" for index in range(1, count + 1)]
    return check_twice(begin, nodes, JobNeeds(gpus=0), None, None)


def test_a_node_that_answers_the_second_time_is_slow_and_fit() -> None:
    begun, begin = starts((["n2"], ""), ([], ""))
    measured = check(begin)
    assert [agents.nodes for agents in begun] == [["n1", "n2", "n3"], ["n2"]]
    assert measured.facts["n2"]["versions"] == {"python": "3.11"}
    (result,) = told(measured, "starts")
    assert (result.node, result.status) == ("n2", "warn")
    assert "did not start within 60 s" in result.words
    assert failures(results(measured)) == []


def test_a_node_that_is_silent_twice_is_unfit() -> None:
    begun, begin = starts((["n2", "n3"], ""), (["n3"], ""))
    measured = check(begin)
    assert [agents.nodes for agents in begun] == [["n1", "n2", "n3"], ["n2", "n3"]]
    assert list(unfit(measured, results(measured))) == ["n3"]
    words = measured.silent["n3"]
    assert words == "did not start within 120 s; before: did not start within 60 s"
    assert list(measured.late) == ["n2"]


def test_a_node_on_which_srun_starts_no_task_is_not_asked_again() -> None:
    begun, begin = starts((["n1", "n2", "n3"], LOST), ([], ""))
    measured = check(begin)
    assert [agents.nodes for agents in begun] == [["n1", "n2", "n3"], ["n1", "n2"]]
    assert measured.silent == {"n3": "srun cannot start a task there"}
    assert list(unfit(measured, results(measured))) == ["n3"]


def test_no_answer_at_all_is_no_result_of_a_node() -> None:
    everyone = ["n1", "n2"]
    _, begin = starts((everyone, "srun: error: Unable to create step"), (everyone, "srun: error"))
    measured = check(begin, count=2)
    assert measured.silent == dict.fromkeys(everyone, "srun: error")


def run_child(
    code: str, imports: float, seconds: float, **options: Any
) -> tuple[dict[str, Any] | None, Child]:
    child = Child([sys.executable, "-I", "-S", "-c", code], **options)
    return child.wait(imports, seconds), child


SLOW = "import time; time.sleep(600)"


@pytest.mark.parametrize(
    ("code", "limits", "problem"),
    [
        ("print('{}')", (600.0, 600.0), None),
        (SLOW, (0.5, 600.0), {"problem": "torch not imported in 0.5 s"}),
        (f"print('{{}}', flush=True); {SLOW}", (600.0, 0.5), {"problem": "no result within 0.5 s"}),
        ("raise SystemExit('no torch')", (600.0, 600.0), {"problem": "no torch", "code": 1}),
    ],
    ids=["works", "import", "product", "fails"],
)
def test_the_import_has_its_own_time(
    code: str, limits: tuple[float, float], problem: dict[str, Any] | None
) -> None:
    found, child = run_child(code, *limits)
    assert found == problem
    assert list(child.records()) == ([{}] if "print" in code else [])


@pytest.mark.parametrize("shared", [True, False])
def test_an_interpreter_without_memfd_create_runs_the_child_too(
    monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    """conda-forge builds Python with a glibc that lacks this function."""
    monkeypatch.delattr(os, "memfd_create")
    options = {} if shared else {"folders": ("/nowhere", "/tmp")}
    problem, child = run_child("print('{}')", 600.0, 600.0, **options)
    assert problem is None
    assert list(child.records()) == [{}]


# No process may write a byte into a file.
UNWRITABLE = """
import json, resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
from pathlib import Path
from hpcrun.network.preflight import agent as node
print(json.dumps([node.spaces(sys.argv[1]), node.write(Path(sys.argv[1]), "n1")]))
"""


def test_a_node_that_can_write_nowhere_still_answers(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", UNWRITABLE, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    spaces, written = json.loads(done.stdout)
    assert {space["what"] for space in spaces} == {"/dev/shm", "temporary folder", "run directory"}
    assert written == {"problem": "File too large"}
