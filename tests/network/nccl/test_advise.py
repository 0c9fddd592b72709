"""Advice on recorded nodes: most get none, and each line that a node gets has a reason and a source."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import TypeAdapter

from hpcrun.network.nccl.advise import Advice, advise, as_data, as_shell
from hpcrun.network.nccl.lint import lint
from hpcrun.network.nccl.machine import NodeFacts
from hpcrun.network.nccl.rules import settings_of

NODES: list[dict[str, Any]] = yaml.safe_load(
    (Path(__file__).parent / "nodes.yaml").read_text(encoding="utf-8")
)


def facts_from(recorded: dict[str, Any]) -> NodeFacts:
    """Return recorded facts; a node has a GPU where the record does not list GPUs."""
    return TypeAdapter(NodeFacts).validate_python({"gpus": ["NVIDIA A100"]} | recorded)


def settings(lines: list[Advice]) -> dict[str, str | None]:
    """The variables to set."""
    return {line.name: line.value for line in lines if line.name is not None}


@pytest.mark.parametrize("node", NODES, ids=lambda node: str(node["node"]))
def test_what_is_to_be_set_and_repaired(node: dict[str, Any]) -> None:
    lines = advise(facts_from(node["facts"]))
    assert settings(lines) == node["set"]
    remarks = [line.reason for line in lines if line.name is None]
    assert len(remarks) == len(node["remarks"])
    for words, remark in zip(node["remarks"], remarks, strict=True):
        assert words in remark
    for record in (line.as_record() for line in lines):
        assert record["reason"]
        assert str(record["source"]).startswith("https://")


@pytest.mark.parametrize("node", NODES, ids=lambda node: str(node["node"]))
def test_lint_has_no_remark_on_the_advice(node: dict[str, Any]) -> None:
    facts = facts_from(node["facts"])
    advised = {line.name: line.value for line in advise(facts) if line.name and line.value}
    assert lint(settings_of(advised, "advice"), facts.nccl) == []


def test_shell_exports_survive_the_shell() -> None:
    hard = "a b'c\"d$HOME`id`"
    text = as_shell([Advice("NCCL_NET", hard, "because\nof this", "env")])
    done = subprocess.run(
        ["sh", "-c", f'{text}\nprintf %s "$NCCL_NET"'], capture_output=True, text=True, check=True
    )
    assert done.stdout == hard
    assert as_shell([]).startswith("# nothing to set")


def test_text_and_data_tell_the_reason() -> None:
    lines = advise(facts_from(NODES[0]["facts"]))
    assert "mlx5_7 (Ethernet, 200 Gbit/s) [https://" in as_shell(lines)
    data = as_data(lines)
    assert data["remarks"] == []
    assert data["set"][0]["name"] == "NCCL_IB_HCA"
