"""Bad nodes are remembered for a while, and excluded only if enough usable nodes for the job remain."""

import os
import time
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
    take_back_if_stuck,
    with_options,
)

RECORDED = Path(__file__).parent / "recorded"
TEN = "".join(f"batch*|n{n}|{'idle' if n <= 2 else 'down*'}|(null)\n" for n in range(1, 11))
# The format of Slurm 22.05 and 26.05: a line for each partition of a node.
GPUS = """batch*|n1|idle|gpu:a100:4(S:0-1)
urgent|n1|idle|gpu:a100:4(S:0-1)
batch*|n2|mixed|gpu:a100:4(S:0-1)
batch*|n3|allocated|(null)
batch*|n4|idle~|gpu:v100:2,shard:8
batch*|n5|idle*|gpu:a100:4
other|n6|idle|gpu:8
"""


class Site:
    """A Slurm that prints given text, and a bad-node list with nodes that failed twice."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environ = {"XDG_STATE_HOME": str(folder)}

    def prints(self, program: str, text: str) -> None:
        path = self.folder / program
        path.write_text(
            f"#!/bin/bash\necho \"$*\" >> {self.folder}/calls\ncat <<'END'\n{text}END\n"
        )
        path.chmod(0o755)

    def blames(self, *nodes: str) -> None:
        for node in nodes:
            for _ in range(2):
                add_failure(bad_nodes_path(self.environ), node, "killed by SIGBUS", "runs/a")

    def avoided(self, request: NodeRequest) -> list[str]:
        return nodes_to_avoid(request, after=2, hours=24.0, environ=self.environ)

    @property
    def calls(self) -> list[str]:
        return (self.folder / "calls").read_text().splitlines()


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
    ("request_", "out"),
    [
        # n2, n3 and n4 remain: n5 does not respond, and n6 belongs to another partition.
        (NodeRequest(None, 3), ["n1"]),
        (NodeRequest(None, 4), []),
        (NodeRequest(None, 2, gpus={"": 2}), ["n1"]),
        (NodeRequest(None, 2, gpus={"": 4}), []),
        (NodeRequest(None, 1, gpus={"a100": 4}), ["n1"]),
        (NodeRequest(None, 1, gpus={"v100": 4}), []),
        (NodeRequest(None, 1, fixed=True), []),
    ],
)
def test_only_nodes_that_could_run_the_job_count(
    site: Site, request_: NodeRequest, out: list[str]
) -> None:
    site.prints("sinfo", GPUS)
    site.blames("n1")
    assert site.avoided(request_) == out


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
    for text in ("gres:gpu:4", "gres/gpu:4"):
        assert request_of({"TresPerNode": text}).gpus == {"": 4}
    for kind in ("a100", "2080ti", "4090", "1g.10gb"):
        assert request_of({"TresPerNode": f"gres/gpu:{kind}:2"}).gpus == {kind: 2}
    assert request_of({"TresPerNode": "gres/gpu:a100"}).gpus == {"a100": 1}
    assert request_of({"Features": "a100", "NumNodes": "2-2"}) == NodeRequest(None, 2, fixed=True)


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


def test_an_exclusion_that_leaves_no_node_is_taken_back(site: Site) -> None:
    site.prints("scontrol", (RECORDED / "22.05" / "show-bad-constraints.txt").read_text())
    assert take_back_if_stuck("9", []) == "BadConstraints"
    assert site.calls[-1] == "update JobId=9 ExcNodeList="
    assert take_back_if_stuck("9", ["n7"]) == "BadConstraints"
    assert site.calls[-1] == "update JobId=9 ExcNodeList=n7"


def test_an_exclusion_stays_while_the_job_waits_for_something_else(site: Site) -> None:
    site.prints("scontrol", "JobId=9 JobState=PENDING Reason=BeginTime Restarts=1\n")
    assert take_back_if_stuck("9", []) is None
    assert site.calls == ["show job 9"]


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


def test_a_node_is_suspect_from_its_second_failure() -> None:
    entries = [NodeFailure(node, 0.0, "", "") for node in ("a", "b", "c", "b", "c", "c")]
    assert suspects(entries, after=2) == ["c", "b"]


def living(*nodes: str) -> dict[str, bool]:
    return dict.fromkeys(nodes, True)


def test_a_job_keeps_enough_nodes_to_run_on() -> None:
    four = {"batch": living("a", "b", "c", "d")}
    assert spare(["c", "b"], four, needed=2) == ["c", "b"]
    assert spare(["c", "b"], four, needed=3) == ["c"]
    assert spare(["c", "b"], {"batch": living("b", "c")}, needed=2) == []
    assert spare(["elsewhere"], {"batch": living("a", "b")}, needed=1) == []


def test_one_of_the_partitions_keeps_enough_nodes() -> None:
    two = {"batch": living("a", "b", "c"), "big": living("d", "e")}
    assert spare(["a", "d"], two, needed=2) == ["a", "d"]
    assert spare(["a", "d", "b"], two, needed=2) == ["a", "d"]


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
