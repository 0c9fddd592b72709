"""Bad nodes are remembered for a while, and never so many that a job cannot run."""

import time
from pathlib import Path

from hpcrun.cluster.ledger import Blame, blame, blames, ledger_path, spare, suspects


def test_blame_is_kept_for_a_time_and_survives_a_torn_line(tmp_path: Path) -> None:
    path = ledger_path({"XDG_STATE_HOME": str(tmp_path)})
    blame(path, "node3", "killed by SIGBUS", "runs/a")
    with path.open("a") as stream:
        stream.write('{"node": "no\n')
    blame(path, "node3", "node-failure", "runs/b")
    kept = blames(path, since=time.time() - 60)
    assert [entry.why for entry in kept] == ["killed by SIGBUS", "node-failure"]
    assert blames(path, since=time.time() + 60) == []
    assert path.stat().st_mode & 0o777 == 0o600


def test_without_a_ledger_nobody_is_blamed(tmp_path: Path) -> None:
    assert blames(tmp_path / "none", since=0.0) == []


def test_a_node_is_suspect_from_its_second_failure_and_the_worst_come_first() -> None:
    entries = [Blame(node, 0.0, "", "") for node in ("a", "b", "c", "b", "c", "c")]
    assert suspects(entries, after=2) == ["c", "b"]


def test_a_job_keeps_enough_nodes_to_run_on() -> None:
    assert spare(["c", "b"], ["a", "b", "c", "d"], needed=2) == ["c", "b"]
    assert spare(["c", "b"], ["a", "b", "c", "d"], needed=3) == ["c"]
    assert spare(["c", "b"], ["b", "c"], needed=2) == []
    assert spare(["elsewhere"], ["a", "b"], needed=1) == []
