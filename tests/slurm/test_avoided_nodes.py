"""Bad nodes are remembered for a while, and excluded only if enough usable nodes for the job remain."""

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from hpcrun import slurm
from hpcrun.slurm.avoided_nodes import (
    NodeFailure,
    NodeRequest,
    add_failure,
    bad_nodes_path,
    forgive,
    node_failures,
    nodes_to_avoid,
    request_of,
    spare,
    suspects,
    with_options,
)
from hpcrun.slurm.nodes import NodeRow, parse_sinfo_gres

RECORDED = Path(__file__).parent / "recorded"
TEN = "".join(f"batch*|n{n}|{'idle' if n <= 2 else 'down*'}|8|100|(null)\n" for n in range(1, 11))
# The format of Slurm 22.05 and 26.05: a line for each partition of a node.
MIXED = """batch*|n1|idle|16|500|gpu:a100:4(S:0-1)
urgent|n1|idle|16|500|gpu:a100:4(S:0-1)
batch*|n2|mixed|16|500|gpu:a100:4(S:0-1)
batch*|n3|allocated|32|900|(null)
batch*|n4|idle~|64|500|gpu:v100:2,shard:8
batch*|n5|idle*|16|500|gpu:a100:4
batch*|n6|idle|16|400|gpu:a100:8
other|n7|idle|16|500|gpu:a100:4
"""


class Site:
    """A Slurm that prints given text, and a bad-node list with nodes that failed twice."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environ = {"XDG_STATE_HOME": str(folder)}

    def prints(self, program: str, text: str) -> None:
        path = self.folder / program
        path.write_text(f"#!/bin/bash\ncat <<'END'\n{text}END\n")
        path.chmod(0o755)

    def blames(self, *nodes: str) -> None:
        for node in nodes:
            for _ in range(2):
                add_failure(bad_nodes_path(self.environ), node, "killed by SIGBUS", "runs/a")

    def avoided(self, request: NodeRequest) -> list[str]:
        return nodes_to_avoid(request, after=2, hours=24.0, environ=self.environ)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return Site(tmp_path)


def test_nodes_that_are_down_do_not_count(site: Site) -> None:
    site.prints("sinfo", TEN)
    site.blames("n1")
    assert site.avoided(NodeRequest(None, 2)) == []
    assert site.avoided(NodeRequest(None, 1)) == ["n1"]


@pytest.mark.parametrize(
    ("bad", "nodes", "out"),
    [
        # Only n2 is like n1: n3 has no GPU, n4 another GPU, n5 does not respond, and n6 less memory.
        (["n1"], 1, ["n1"]),
        (["n1"], 2, []),
        # No other node has eight GPUs.
        (["n6"], 1, []),
        (["n5"], 2, ["n5"]),
        (["n1", "n2"], 1, ["n1"]),
        (["n7"], 1, []),
    ],
)
def test_only_nodes_like_the_excluded_node_count(
    site: Site, bad: list[str], nodes: int, out: list[str]
) -> None:
    site.prints("sinfo", MIXED)
    site.blames(*bad)
    assert site.avoided(NodeRequest(None, nodes)) == out
    assert site.avoided(NodeRequest(None, nodes, fixed=True)) == []


def test_a_node_that_the_job_excludes_itself_does_not_remain(site: Site) -> None:
    site.prints("sinfo", TEN.replace("down*", "idle", 1))
    site.blames("n1")
    assert site.avoided(NodeRequest(None, 2)) == ["n1"]
    assert site.avoided(NodeRequest(None, 2, excluded=frozenset({"n3"}))) == []
    shown = {"Partition": "batch", "NumNodes": "2", "ExcNodeList": "n[3-4]"}
    assert request_of(shown).excluded == {"n3", "n4"}


def test_what_a_job_asks_for_is_read_from_the_controller() -> None:
    def recorded(version: str, name: str) -> NodeRequest:
        text = (RECORDED / version / f"show-{name}.txt").read_text()
        return request_of(slurm.parse_show_job(text))

    # A job of three nodes: two are done.
    assert recorded("26.05", "preempting") == NodeRequest("batch", 1)
    assert request_of({"Partition": "batch", "NumNodes": "1"}, 3) == NodeRequest("batch", 3)
    # Submitted with --nodelist.
    assert recorded("22.05", "bad-constraints").fixed
    assert request_of({"Features": "a100", "NumNodes": "2-2"}) == NodeRequest(None, 2, fixed=True)
    assert request_of({"MinTmpDiskNode": "9000"}).fixed


@pytest.mark.parametrize(
    ("options", "fixed", "partition"),
    [
        ([], False, "batch"),
        (["--exclusive", "--mem=0"], False, "batch"),
        (["--nodelist=n1"], True, "batch"),
        (["-w", "n1"], True, "batch"),
        (["-wn1"], True, "batch"),
        (["--reservation=x"], True, "batch"),
        (["-C", "a100"], True, "batch"),
        (["--partition=a,b"], False, "a,b"),
        (["-p", "a"], True, "batch"),
        (["-pa"], False, "a"),
    ],
)
def test_further_options_of_sbatch_are_heeded(
    options: list[str], fixed: bool, partition: str
) -> None:
    found = with_options(NodeRequest("batch", 2), options)
    assert (found.fixed, found.partition) == (fixed, partition)


def test_blame_lasts_and_survives_a_torn_line(tmp_path: Path) -> None:
    path = bad_nodes_path({"XDG_STATE_HOME": str(tmp_path)})
    add_failure(path, "node3", "killed by SIGBUS", "runs/a")
    with path.open("a") as stream:
        stream.write('{"node": "no\n')
    add_failure(path, "node3", "node-failure", "runs/b")
    kept = node_failures(path, since=time.time() - 60)
    assert [entry.why for entry in kept] == ["killed by SIGBUS", "node-failure"]
    assert node_failures(path, since=time.time() + 60) == []
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_failure_counts_only_on_its_own_cluster(site: Site) -> None:
    site.prints("sinfo", TEN.replace("down*", "idle"))
    path = bad_nodes_path(site.environ)
    for cluster in ("alpha", "alpha", "", ""):
        node = "n1" if cluster else "n2"
        add_failure(path, node, "killed by SIGBUS", "runs/a", cluster=cluster)
    # The same job number on two clusters is two jobs.
    for cluster, attempt in (("beta", "7-0"), ("gamma", "7-0"), ("gamma", "8-0")):
        add_failure(path, "n3", "killed by SIGBUS", "runs/a", attempt, cluster=cluster)

    def avoided(name: str | None) -> list[str]:
        site.prints("scontrol", f"ClusterName             = {name}\n" if name else "")
        return site.avoided(NodeRequest(None, 1))

    assert avoided("alpha") == ["n1"]
    assert avoided("beta") == []
    assert avoided("gamma") == ["n3"]
    # A record of an older version has no cluster: it counts where the cluster has no name.
    assert avoided(None) == ["n2"]
    site.environ["SLURM_CLUSTER_NAME"] = "alpha"
    assert avoided("beta") == ["n1"]
    forgive(path, "n1", "beta")
    assert avoided(None) == ["n1"]
    forgive(path, "n1", "alpha")
    assert avoided(None) == []


def test_the_job_records_its_own_cluster(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    path = bad_nodes_path(site.environ)
    site.prints("scontrol", "ClusterName             = alpha\n")
    add_failure(path, "n1", "down", "runs/a")
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "beta")
    add_failure(path, "n1", "down", "runs/a")
    assert [one.cluster for one in node_failures(path, 0.0)] == ["alpha", "beta"]


def test_a_node_is_suspect_from_its_second_failure() -> None:
    entries = [NodeFailure(node, 0.0, "", "") for node in ("a", "b", "c", "b", "c", "c")]
    assert suspects(entries, after=2) == ["c", "b"]


def rows(partition: str, *nodes: str) -> list[NodeRow]:
    return [NodeRow(partition, False, node, "idle", 8, 100, {}) for node in nodes]


def test_a_job_keeps_enough_nodes_to_run_on() -> None:
    four = rows("batch", "a", "b", "c", "d")
    assert spare(["c", "b"], four, needed=2) == ["c", "b"]
    assert spare(["c", "b"], four, needed=3) == ["c"]
    assert spare(["c", "b"], rows("batch", "b", "c"), needed=2) == []
    assert spare(["elsewhere"], rows("batch", "a", "b"), needed=1) == []


def test_a_partition_of_each_node_keeps_enough_nodes() -> None:
    two = rows("batch", "a", "b", "c") + rows("big", "d", "e", "f")
    assert spare(["a", "d"], two, needed=2) == ["a", "d"]
    assert spare(["a", "d", "b"], two, needed=2) == ["a", "d"]
    # A larger node may be the replacement of a smaller node, until it fails too.
    mixed = [*rows("batch", "a", "b"), replace(rows("batch", "c")[0], memory=200)]
    assert spare(["a"], mixed, needed=2) == ["a"]
    assert spare(["a", "c"], mixed, needed=1) == ["a"]


@pytest.mark.parametrize(
    ("gres", "others", "avoided"),
    [
        ("gpu:a100:4(S:0-1),nvme:1", "gpu:a100:8", []),
        ("gpu:a100:4(S:0-1),nvme:1", "gpu:a100:4(S:0,1),nvme:no_consume:2,nvme:1", ["a"]),
        ("lscratch:800G", "lscratch:400G", []),
        ("(null)", "gpu:4", ["a"]),
    ],
)
def test_other_nodes_must_have_the_generic_resources(
    gres: str, others: str, avoided: list[str]
) -> None:
    listed = f"batch*|a|idle|8|100|{gres}\nbatch*|b|idle|8|100|{others}\n"
    assert spare(["a"], parse_sinfo_gres(listed), needed=1) == avoided


def test_a_forgiven_node_is_blamed_for_later_failures_only(tmp_path: Path) -> None:
    path = tmp_path / "nodes.jsonl"
    for node in ("n1", "n2"):
        add_failure(path, node, "killed by SIGBUS", "runs/a")
    forgive(path, "n1")
    assert [entry.node for entry in node_failures(path, 0.0)] == ["n2"]
    add_failure(path, "n1", "killed by SIGKILL", "runs/b")
    assert [(entry.node, entry.why) for entry in node_failures(path, 0.0)] == [
        ("n2", "killed by SIGBUS"),
        ("n1", "killed by SIGKILL"),
    ]
