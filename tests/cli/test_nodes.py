"""`hpcrun nodes`: the recorded failures of nodes, and their removal."""

import json
from pathlib import Path

import pytest

from hpcrun.cli.main import guarded
from hpcrun.slurm.avoided_nodes import add_failure, bad_nodes_path, node_failures


@pytest.fixture
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return bad_nodes_path()


def test_no_node_is_known_at_first(ledger: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert guarded(["nodes"]) == 0
    assert capsys.readouterr().out == "hpcrun: no node has failed one of your runs\n"
    assert not ledger.exists()


def test_nodes_are_shown_with_their_failures_and_forgiven(
    ledger: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for node, why in (("n1", "killed by SIGBUS"), ("n1", "killed by SIGKILL"), ("n2", "down")):
        add_failure(ledger, node, why, "runs/a")
    assert guarded(["nodes"]) == 0
    told = capsys.readouterr().out
    (first,) = [line for line in told.splitlines() if line.startswith("n1")]
    assert "yes" in first
    assert "killed by SIGKILL (runs/a)" in first
    (second,) = [line for line in told.splitlines() if line.startswith("n2")]
    assert "no " in second
    assert "`hpcrun nodes --forgive NODE` ends the exclusion" in told

    assert guarded(["nodes", "--json"]) == 0
    rows = {row["node"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    assert (rows["n1"]["excluded"], rows["n1"]["recent"]) == (True, 2)
    assert [failure["why"] for failure in rows["n1"]["failures"]] == [
        "killed by SIGBUS",
        "killed by SIGKILL",
    ]
    assert rows["n2"]["excluded"] is False

    assert guarded(["nodes", "--forgive", "n1"]) == 0
    assert "n1: forgiven" in capsys.readouterr().out
    assert [entry.node for entry in node_failures(ledger, 0.0)] == ["n2"]


def test_a_node_without_failures_is_refused(
    ledger: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add_failure(ledger, "n2", "down", "runs/a")
    assert guarded(["nodes", "--forgive", "n9"]) == 2
    assert capsys.readouterr().err == (
        "hpcrun: --forgive n9: no failure is recorded for this node; known are n2 (see `hpcrun nodes`)\n"
    )


def test_equal_names_of_two_clusters_are_two_nodes(
    ledger: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for cluster in ("alpha", "alpha", "beta"):
        add_failure(ledger, "n1", "down", "runs/a", cluster=cluster)
    add_failure(ledger, "n2", "down", "runs/a", cluster="beta")
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "gamma")
    assert guarded(["nodes", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    found = {(row["cluster"], row["node"]): row["excluded"] for row in rows}
    assert found == {("alpha", "n1"): True, ("beta", "n1"): False, ("beta", "n2"): False}
    assert guarded(["nodes", "--cluster", "beta"]) == 0
    assert "alpha" not in capsys.readouterr().out
    assert guarded(["nodes", "--forgive", "n1"]) == 2
    assert "several clusters have a node of this name; add --cluster: alpha, beta" in (
        capsys.readouterr().err
    )
    assert guarded(["nodes", "--forgive", "n1", "--cluster", "alpha"]) == 0
    assert "n1 of alpha: forgiven" in capsys.readouterr().out
    assert guarded(["nodes", "--forgive", "n2"]) == 0
    assert [(one.cluster, one.node) for one in node_failures(ledger, 0.0)] == [("beta", "n1")]
