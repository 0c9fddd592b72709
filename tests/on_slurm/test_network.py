"""The network check on a real Slurm: each injected fault is named, and healthy nodes get no finding."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from . import planted_faults
from .cluster import SlurmCluster
from .planted_faults import environment, named
from .scripts import SBATCH

pytestmark = pytest.mark.slurm
SHORT = ("--seconds", "1", "--streams", "1", "--patience", "200", "--all-reduce", "0")


@pytest.fixture
def whole(slurm: SlurmCluster) -> Iterator[SlurmCluster]:
    """The cluster; faults are removed after the test."""
    yield slurm
    slurm.heal()


def check(slurm: SlurmCluster, *options: str) -> dict[str, Any]:
    """Return the report of a short check."""
    return planted_faults.check(slurm, *SHORT, *options)


def test_a_healthy_cluster_has_no_finding_and_complete_measurements(whole: SlurmCluster) -> None:
    report = check(whole, "--all-reduce", "200")
    assert named(report) == []
    assert report["exclude"] == []
    seen = report["collective"]
    assert (seen["backend"], seen["ranks"], seen["problem"]) == ("gloo", len(whole.nodes), None)
    assert seen["nodes"] == whole.nodes
    assert seen["busbw_bytes_per_second"] > 0
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
    assert report["exclude"] == ["node3"], report["findings"]
    # Slurm's packets are lost too, so the node's answers may come too late.
    assert named(report)[0][0] in ("slow", "silent"), report["findings"]


@pytest.mark.slow
def test_the_report_has_the_few_packets_that_were_lost(whole: SlurmCluster) -> None:
    whole.lossy_link("node3", 3)
    report = check(whole)
    assert report["nodes"][2]["resent"] > 0.01
    assert report["exclude"] == ["node3"], report["findings"]


def test_a_node_with_a_smaller_mtu_is_named(whole: SlurmCluster) -> None:
    set_mtu = ["ip", "link", "set", "eth0", "mtu"]
    whole.run([*set_mtu, "576"], host="node2", user="root")
    try:
        report = check(whole)
    finally:
        whole.run([*set_mtu, "1500"], host="node2", user="root")
    assert ("mtu", ["node2"]) in named(report)
    assert report["exclude"] == ["node2"]


@pytest.mark.slow
def test_only_the_node_that_vanishes_is_named(whole: SlurmCluster) -> None:
    """Without --no-kill, Slurm ends the job and the tasks on the healthy nodes too."""
    words = ["salloc", "-N4", whole.python, "-m", "hpcrun", "netcheck", "--json", *SHORT]
    checking = whole.popen([*words, "--seconds", "4"], env=environment(whole))

    def started() -> bool:
        return any("network.agent" in command_of(pid) for pid in whole.processes("node3"))

    whole.wait_until(started)
    whole.kill_node("node3")
    out, err = checking.communicate(timeout=300)
    assert checking.returncode == 1, err
    report = json.loads(out)
    assert report["exclude"] == ["node3"], report["findings"]
    assert ("silent", []) in named(report)


def test_a_slow_link_between_two_good_nodes_is_named(whole: SlurmCluster) -> None:
    there = planted_faults.addresses(whole)["node4"]
    rule = f"ip daddr {there} limit rate over 6 mbytes/second burst 256 kbytes drop"
    with planted_faults.rules(whole, "node1", "output", rule):
        report = check(whole)
    assert named(report) == [("link", ["node1", "node4"])], report["findings"]
    assert len(report["exclude"]) == 1


@pytest.mark.slow
def test_a_pair_without_a_connection_is_named(whole: SlurmCluster) -> None:
    there = planted_faults.addresses(whole)["node4"]
    # Slurm's port stays open.
    with planted_faults.rules(whole, "node2", "input", f"ip saddr {there} tcp dport != 6818 drop"):
        report = check(whole, "--all-reduce", "200")
    assert named(report) == [("unreachable", ["node2", "node4"])], report["findings"]
    assert "in both directions" in report["findings"][0]["words"]
    assert report["collective"]["problem"] is None
    assert len(report["collective"]["nodes"]) == len(whole.nodes) - 1


@pytest.mark.slow
def test_a_node_that_takes_no_task_is_named(whole: SlurmCluster) -> None:
    # The order to start a task is larger than 1400 bytes.
    with planted_faults.rules(whole, "node2", "input", "ip length > 1400 drop"):
        report = check(whole)
    assert named(report) == [("silent", ["node2"])], report["findings"]
    assert "srun could not start a task there" in report["findings"][0]["words"]


@pytest.mark.slow
def test_a_wrong_entry_in_a_hosts_file_is_named(whole: SlurmCluster) -> None:
    with planted_faults.wrong_entry(whole, "node4", "node1"):
        report = check(whole)
    assert named(report) == [("name", ["node4"])]
    assert "node1" in report["findings"][0]["words"]


def test_a_node_that_refuses_connections_is_named(whole: SlurmCluster) -> None:
    # slurmd's port stays open.
    rule = "iifname eth0 tcp flags & (syn | ack) == syn tcp dport != 6818 reject with tcp reset"
    with planted_faults.rules(whole, "node2", "input", rule):
        report = check(whole)
    assert named(report) == [("refuses", ["node2"])]


LINKS = """
import json, sys, time
from pathlib import Path
from hpcrun.ranks.distributed import DistributedConfig
from hpcrun.ranks.interfaces import NodeLinks

folder, node, nodes = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])

def write(key, value):
    (folder / (key.replace("/", "-") + ".new")).write_text(value)
    (folder / (key.replace("/", "-") + ".new")).rename(folder / key.replace("/", "-"))

def read(key):
    path = folder / key.replace("/", "-")
    return path.read_text() if path.exists() else None

place = dict(world_size=nodes, rank=node, num_nodes=nodes, node_rank=node, num_gpus_per_node=1)
links = NodeLinks(DistributedConfig(**place))
with links.open(write):
    while not all(read(f"link/{other}") for other in range(nodes)):
        time.sleep(0.05)
    print(json.dumps(links.broken(read, 2.0)), flush=True)
    write(f"done/{node}", "1")
    while not all(read(f"done/{other}") for other in range(nodes)):
        time.sleep(0.05)
"""


def test_a_start_of_nccl_names_the_link_that_drops_packets(whole: SlurmCluster) -> None:
    folder, nodes = whole.shared / "links", whole.nodes[:3]
    folder.mkdir()
    folder.chmod(0o777)
    known = planted_faults.addresses(whole)
    rule = f"ip saddr {known['node1']} tcp flags & (syn | ack) == syn tcp dport != 6818 drop"
    with planted_faults.rules(whole, "node2", "input", rule):
        started = [
            whole.popen(
                [whole.python, "-c", LINKS, str(folder), str(number), str(len(nodes))],
                host=node,
                env=environment(whole),
            )
            for number, node in enumerate(nodes)
        ]
        ended = [one.communicate(timeout=300) for one in started]
    found = [json.loads(out) if out else err for out, err in ended]
    address = f"{known['node2']} (interface eth0: timed out)"
    assert found == [{"node2": address}, {}, {}]


@pytest.mark.slow
def test_a_silent_node_gets_a_finding_without_a_hang(whole: SlurmCluster) -> None:
    words = ["-m", "hpcrun", "netcheck", "--json", *SHORT]
    checking = whole.popen([*planted_faults.SALLOC, whole.python, *words], env=environment(whole))

    def agent() -> int | None:
        commands = {pid: command_of(pid) for pid in whole.processes("node3")}
        return next((pid for pid, command in commands.items() if "network.agent" in command), None)

    whole.wait_until(lambda: agent() is not None)
    stopped = agent()
    assert stopped is not None
    os.kill(stopped, signal.SIGSTOP)
    out, err = checking.communicate(timeout=300)
    assert checking.returncode == 1, err
    assert ("silent", ["node3"]) in named(json.loads(out))


@pytest.mark.slow
def test_a_node_that_hangs_in_the_all_reduce_is_named(whole: SlurmCluster) -> None:
    words = ["-m", "hpcrun", "netcheck", "--json", *SHORT, "--all-reduce", "40"]
    checking = whole.popen([*planted_faults.SALLOC, whole.python, *words], env=environment(whole))
    while checking.poll() is None:
        for pid in whole.processes("node3"):
            if "torch_rank" in command_of(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
        time.sleep(0.2)
    out, err = checking.communicate(timeout=300)
    assert checking.returncode == 1, err
    report = json.loads(out)
    assert named(report) == [("collective", ["node3"])], report["findings"]
    assert report["exclude"] == ["node3"]


def command_of(pid: int) -> str:
    """Return the command line of a process; empty if the process has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


@pytest.mark.slow
def test_a_batch_script_checks_its_own_nodes(whole: SlurmCluster) -> None:
    job = whole.sbatch(
        "-N3", str(SBATCH / "netcheck.sbatch"), "--seconds", "0.5", "--streams", "1", "--all-reduce=0",
        env=environment(whole),
    )  # fmt: skip
    assert whole.wait_state(job) == "COMPLETED"
    text = (whole.shared / f"netcheck-{job}.out").read_text()
    assert "nothing is wrong" in text


@pytest.mark.slow
def test_a_search_for_settings_runs_in_an_allocation(whole: SlurmCluster) -> None:
    tune = ["hpcrun", "nccl", "tune", "--backend", "gloo", "--collectives", "all_reduce"]
    words = ["salloc", "-N2", "--ntasks-per-node=1", whole.python, "-m", *tune]
    words += ["--sizes", "8:1K:128", "--seconds", "0.01", "--json"]
    done = whole.run(words, env=environment(whole), check=False, timeout=580)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert (report["ranks"], report["nodes"], report["env"]) == (2, 2, {})
