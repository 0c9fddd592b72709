"""Advice on recorded nodes: most get none, and each line that a node gets has a reason and a source."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from hpcrun.errors import NetworkError
from hpcrun.network.nccl.advise import (
    Advice,
    advise,
    as_data,
    as_shell,
    as_table,
    as_yaml,
    differences,
    presets,
    with_preset,
)
from hpcrun.network.nccl.lint import lint
from hpcrun.network.nccl.machine import NodeFacts, facts_from, gpu_links
from hpcrun.network.nccl.rules import settings_of

NODES: list[dict[str, Any]] = yaml.safe_load(
    (Path(__file__).parent / "nodes.yaml").read_text(encoding="utf-8")
)
DGX = facts_from(NODES[0]["facts"])
TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tNV18\tPXB\t0-55,112-167\t0\t\tN/A
GPU1\tNV18\t X \tNV18\tSYS\t0-55,112-167\t0\t\tN/A
GPU2\tNV18\tNV18\t X \tNODE\t0-55,112-167\t0\t\tN/A
NIC0\tPXB\tSYS\tNODE\t X

Legend:
  NV#  = Connection traversing a bonded set of # NVLinks
"""


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


@pytest.mark.parametrize("name", presets())
def test_presets_are_settings_of_known_variables(name: str) -> None:
    preset = presets()[name]
    found = lint(settings_of(preset.env, name))
    assert [finding.message for finding in found if finding.level != "note"] == []
    slingshot = advise(facts_from(next(one["facts"] for one in NODES if "Alps" in one["node"])))
    both = {key: value for key, value in settings(with_preset(slingshot, name)).items() if value}
    assert [one.message for one in lint(settings_of(both, name)) if one.level != "note"] == []
    assert preset.source.startswith("https://")
    assert preset.read


def test_a_preset_replaces_our_line_of_the_same_name() -> None:
    ours = [Advice("NCCL_SOCKET_IFNAME", "eth0", "ours", "env"), Advice(None, None, "look", "env")]
    lines = with_preset(ours, "lumi")
    assert settings(lines)["NCCL_SOCKET_IFNAME"] == "hsn"
    assert lines[-1].reason == "look"
    with pytest.raises(NetworkError, match="did you mean lumi"):
        with_preset(ours, "lummi")


def test_facts_survive_json() -> None:
    assert facts_from(json.loads(json.dumps(DGX.as_record()))) == DGX
    with pytest.raises(NetworkError, match="gpu_count"):
        facts_from({"host": "a", "gpu_count": 3})
    for wrong in ({"rdma": 3}, {"interfaces": ["eth0"]}, {"gpus": "H100"}):
        with pytest.raises(NetworkError, match=f"{next(iter(wrong))}.*should be.*--record"):
            facts_from({"host": "a", **wrong})


def test_shell_exports_survive_the_shell() -> None:
    hard = "a b'c\"d$HOME`id`"
    text = as_shell([Advice("NCCL_NET", hard, "because\nof this", "env")])
    done = subprocess.run(
        ["sh", "-c", f'{text}\nprintf %s "$NCCL_NET"'], capture_output=True, text=True, check=True
    )
    assert done.stdout == hard
    assert as_shell([]).startswith("# nothing to set")


def test_yaml_is_what_a_config_takes() -> None:
    lines = advise(DGX)
    read = yaml.safe_load(as_yaml([*lines, Advice(None, None, "look\nhere", "env")]))
    assert read == {"job": {"env": settings(lines)}}
    assert yaml.safe_load(as_yaml([])) == {"job": {"env": {}}}


def test_table_and_data_tell_the_reason() -> None:
    lines = advise(DGX)
    assert "mlx5_1 (Ethernet, 200 Gbit/s)" in as_table(lines)
    assert "nothing to set" in as_table([])
    data = as_data(lines)
    assert data["remarks"] == []
    assert data["set"][0]["name"] == "NCCL_IB_HCA"


def test_nvidia_smi_is_read() -> None:
    assert gpu_links(TOPOLOGY) == ("NV18",)
    assert gpu_links("") == ()
    assert gpu_links("NVIDIA-SMI has failed because it could not communicate with the driver") == ()
    one = "\tGPU0\tCPU Affinity\nGPU0\t X \t0-7\n"
    assert gpu_links(one) == ()


def test_nodes_that_differ_are_named() -> None:
    def node(name: str, **changes: Any) -> NodeFacts:
        return dataclasses.replace(DGX, host=name, **changes)

    assert differences([node("a"), node("b")]) == []
    found = differences([node("a"), node("b"), node("c", memlock=65536, gpus=DGX.gpus[:1])])
    assert [one.what for one in found] == ["GPUs", "ulimit -l"]
    assert str(found[1]) == "ulimit -l: unlimited on a, b; 65536 on c"
