"""The network check on a real Slurm: each planted fault is named, and a clean fleet gets no verdict."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .cluster import SlurmCluster
from .scripts import SBATCH

pytestmark = pytest.mark.slurm
SHORT = ("--seconds", "1", "--streams", "1", "--patience", "200", "--json")


@pytest.fixture
def whole(slurm: SlurmCluster) -> Iterator[SlurmCluster]:
    """The cluster, without a fault afterwards."""
    yield slurm
    slurm.heal()


def environment(slurm: SlurmCluster) -> dict[str, str]:
    """As in an activated virtual environment; the checkout under test comes first."""
    path = f"{Path(slurm.python).parent}:/usr/local/bin:/usr/bin:/bin"
    return {"PATH": path, "PYTHONPATH": str(SBATCH.parent)}


def check(slurm: SlurmCluster, *options: str) -> dict[str, Any]:
    """The report of a check over all nodes, asked for from the login host."""
    words = ["-m", "hpcrun", "netcheck", "--nodes", str(len(slurm.nodes)), *SHORT, *options]
    done = slurm.run([slurm.python, *words], env=environment(slurm), check=False)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == bool(report["verdicts"])
    return report


def named(report: dict[str, Any]) -> list[tuple[str, list[str]]]:
    """Kind and nodes of each verdict."""
    return [(verdict["kind"], verdict["nodes"]) for verdict in report["verdicts"]]


def test_a_clean_fleet_has_no_verdict_and_every_pair_is_measured(whole: SlurmCluster) -> None:
    report = check(whole)
    assert named(report) == []
    assert report["exclude"] == []
    pairs = {(one["sender"], one["receiver"]) for one in report["transfers"]}
    assert len(pairs) == len(whole.nodes) * (len(whole.nodes) - 1)
    assert all(check["problem"] is None for check in report["names"])
    assert all(node["latency_seconds"] < 1 for node in report["nodes"])


def test_a_slow_node_is_named(whole: SlurmCluster) -> None:
    whole.slow_link("node2", "50mbit")
    report = check(whole)
    assert named(report) == [("slow", ["node2"])]
    assert report["exclude"] == ["node2"]


@pytest.mark.slow
def test_a_node_that_drops_packets_is_named(whole: SlurmCluster) -> None:
    whole.lossy_link("node3", 20)
    report = check(whole)
    assert report["exclude"] == ["node3"], report["verdicts"]
    # What Slurm itself sends is lost as well, so that the node's answers may come too late.
    assert named(report)[0][0] in ("lossy", "slow", "silent"), report["verdicts"]


def test_a_slow_link_between_two_good_nodes_is_named(whole: SlurmCluster) -> None:
    hosts = whole.run(["cat", "/etc/hosts"], host="node1").stdout.splitlines()
    address = next(line.split()[0] for line in hosts if "node4" in line.split())
    rules = (
        "table inet narrow { chain output { type filter hook output priority 0;"
        f" ip daddr {address} limit rate over 6 mbytes/second burst 256 kbytes drop; }}; }}"
    )
    whole.run(["nft", "-f", "-"], host="node1", user="root", stdin=rules)
    try:
        report = check(whole)
    finally:
        whole.run(["nft", "delete", "table", "inet", "narrow"], host="node1", user="root")
    assert named(report) == [("link", ["node1", "node4"])], report["verdicts"]
    assert len(report["exclude"]) == 1


@pytest.mark.slow
def test_a_wrong_entry_in_a_hosts_file_is_named(whole: SlurmCluster) -> None:
    text = whole.run(["cat", "/etc/hosts"], host="node4").stdout
    lines = [line.split() for line in text.splitlines() if line.split()]
    address = {name: words[0] for words in lines for name in words[1:]}
    wrong = whole.shared / "hosts-of-node4"
    wrong.write_text(
        "".join(f"{address['login'] if 'node1' in words else words[0]} {' '.join(words[1:])}\n"
                for words in lines)
    )  # fmt: skip
    whole.run(["mount", "--bind", str(wrong), "/etc/hosts"], host="node4", user="root")
    try:
        report = check(whole)
    finally:
        whole.run(["umount", "/etc/hosts"], host="node4", user="root")
    assert named(report) == [("name", ["node4"])]
    assert "node1" in report["verdicts"][0]["text"]


def test_a_node_that_refuses_connections_is_named(whole: SlurmCluster) -> None:
    # slurmd's port stays open.
    rules = (
        "table inet closed { chain input { type filter hook input priority 0;"
        " iifname eth0 tcp flags & (syn | ack) == syn tcp dport != 6818 reject with tcp reset; }; }"
    )
    whole.run(["nft", "-f", "-"], host="node2", user="root", stdin=rules)
    try:
        report = check(whole)
    finally:
        whole.run(["nft", "delete", "table", "inet", "closed"], host="node2", user="root")
    assert named(report) == [("refuses", ["node2"])]


@pytest.mark.slow
def test_a_node_that_stops_to_answer_is_a_verdict_and_not_a_hang(whole: SlurmCluster) -> None:
    words = ["-m", "hpcrun", "netcheck", "--nodes", "4", *SHORT]
    checking = whole.popen([whole.python, *words], env=environment(whole))

    def agent() -> int | None:
        commands = {pid: command_of(pid) for pid in whole.processes("node3")}
        return next((pid for pid, command in commands.items() if "check.agent" in command), None)

    whole.wait_until(lambda: agent() is not None)
    stopped = agent()
    assert stopped is not None
    os.kill(stopped, signal.SIGSTOP)
    out, err = checking.communicate(timeout=300)
    assert checking.returncode == 1, err
    assert ("silent", ["node3"]) in named(json.loads(out))


def command_of(pid: int) -> str:
    """The command line of a process; empty where the process has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


@pytest.mark.slow
def test_a_batch_script_checks_its_own_nodes(whole: SlurmCluster) -> None:
    job = whole.sbatch(
        "-N3", str(SBATCH / "netcheck.sbatch"), "--seconds", "0.5", "--streams", "1",
        env=environment(whole),
    )  # fmt: skip
    assert whole.wait_state(job) == "COMPLETED"
    text = (whole.shared / f"netcheck-{job}.out").read_text()
    assert "nothing is wrong" in text
    assert "Gbit/s, from row to column" in text
