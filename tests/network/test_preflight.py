"""A preflight of constructed nodes: the judgment over all nodes, and silent nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from hpcrun.network.preflight import (
    PreflightFacts,
    as_data,
    cause,
    failures,
    lines,
    measure,
    results,
    unfit,
)
from hpcrun.ports.node_checks import Answer, Needs, Record, Same

ECC = Answer("fail", "GPU 0: 5 uncorrected ECC errors", "report the node")


def facts(**records: tuple[str, Record]) -> PreflightFacts:
    """Return the facts of three nodes; some have a bad answer."""
    nodes = ["n1", "n2", "n3"]
    measured = PreflightFacts(nodes)
    measured.found = {node: [("limits", Answer("pass", "enough"))] for node in nodes}
    for node, (check, record) in records.items():
        measured.tell(node, check, record)
    return measured


def test_the_report_ends_with_the_option_that_excludes_the_node() -> None:
    measured = facts(n2=("ecc", ECC))
    text = lines(measured, results(measured))
    assert text[-2:] == ["not fit: n2", "--exclude=n2"]
    assert "fail     ecc     n2: GPU 0: 5 uncorrected ECC errors; report the node" in text
    data = as_data(measured, results(measured))
    assert data["unfit"] == {"n2": "ecc: GPU 0: 5 uncorrected ECC errors"}
    assert data["cause"].startswith("preflight on n2: ecc: GPU 0: 5 uncorrected ECC errors; report")
    assert data["found"]["n2"][-1]["check"] == "ecc"


def test_what_fails_on_every_node_blames_none() -> None:
    missing = ("gpus", Answer("fail", "0 of 1 GPUs are visible"))
    measured = facts(n1=missing, n2=missing, n3=missing)
    found = results(measured)
    assert len(failures(found)) == 3
    assert unfit(measured, found) == {}
    assert cause(found, {}).startswith("preflight on n1: gpus: 0 of 1 GPUs are visible (and 2 more")


@pytest.mark.parametrize(("check", "bad"), [("run directory", []), ("ecc", ["n1"])])
def test_the_only_node_is_blamed_for_its_hardware_alone(check: str, bad: list[str]) -> None:
    measured = PreflightFacts(["n1"])
    measured.tell("n1", check, ECC)
    assert list(unfit(measured, results(measured))) == bad


def test_two_nodes_that_differ_are_named_without_blame() -> None:
    measured = PreflightFacts(["n1", "n2"])
    for node, version in (("n1", "2.6.0"), ("n2", "2.5.1")):
        measured.tell(node, "gemm", Same("torch", version, "", check="versions"))
    (one,) = failures(results(measured))
    assert (one.check, one.nodes) == ("versions", ())
    assert unfit(measured, results(measured)) == {}


class Processes:
    """Agents in this process: each of ``nodes`` answers immediately, but those in ``silent`` never."""

    def __init__(self, nodes: Sequence[str], silent: Sequence[str], words: str = "") -> None:
        self.nodes, self._words = list(nodes), words
        self._living = [node for node in nodes if node not in silent]
        self._answers = [{"node": node, "number": 0, "value": None} for node in self._living]
        self.closed = False

    def tell(self, order: Mapping[str, Any]) -> None:
        """Answer with a file, or nothing."""
        values = {"write": {"seconds": 0.1}}
        for node in self._living:
            answer = {"node": node, "number": order["number"]}
            if order["do"] == "versions":
                same = vars(Same("python", "3.11", ""))
                self._answers.append({**answer, "part": same})
            elif order["do"] in values:
                answer["value"] = values[order["do"]]
            self._answers.append(answer)

    def hear(self, timeout: float) -> dict[str, Any] | None:
        return self._answers.pop(0) if self._answers else None

    def words(self) -> str:
        return self._words

    def ended(self) -> bool:
        return False

    def close(self) -> None:
        self.closed = True


def check(silent: Sequence[str], words: str = "", folder: Path | None = None) -> PreflightFacts:
    """Check three nodes; those in ``silent`` never answer. ``words``: of srun."""
    return measure(
        lambda nodes: Processes(nodes, silent, words),  # type: ignore[arg-type,return-value]
        ["n1", "n2", "n3"],
        Needs(gpus=0),
        folder,
    )


def test_a_silent_node_is_unfit_and_the_others_are_not(tmp_path: Path) -> None:
    measured = check(["n2"], folder=tmp_path)
    assert ("versions", Same("python", "3.11", "")) in measured.found["n1"]
    assert list(tmp_path.iterdir()) == []
    assert measured.silent == {"n2": "did not start within 120 s"}
    assert list(unfit(measured, results(measured))) == ["n2"]


def test_no_answer_at_all_is_no_result_of_a_node() -> None:
    everyone = ["n1", "n2", "n3"]
    assert check(everyone, "srun: error").silent == dict.fromkeys(everyone, "srun: error")
