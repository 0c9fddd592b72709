"""Bad nodes are remembered for a while, and never so many that a job cannot run."""

import time
from pathlib import Path

from hpcrun.slurm.avoided_nodes import (
    NodeFailure,
    add_failure,
    bad_nodes_path,
    forgive,
    node_failures,
    spare,
    suspects,
)


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
