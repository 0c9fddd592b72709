"""Ranks find each other on nodes with two networks, and on nodes with names that do not resolve."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hpcrun.run.attempt import Attempt

from .training import Bench

pytestmark = pytest.mark.slurm


def as_root(bench: Bench, node: str, line: str) -> str:
    """Run a shell line as root on a node."""
    return bench.slurm.run(["sh", "-c", line], host=node, user="root").stdout


@pytest.fixture
def two_networks(bench: Bench) -> Iterator[list[str]]:
    """Give each node's own name an address without a route; return the good addresses."""
    text = bench.slurm.run(["cat", "/etc/hosts"]).stdout
    nodes = bench.slurm.nodes[:2]
    good = [bench.slurm.run(["getent", "hosts", node]).stdout.split()[0] for node in nodes]
    for number, node in enumerate(nodes, 1):
        others = [line for line in text.splitlines() if line.split()[1:] != [node]]
        hosts = bench.folder / f"hosts-{node}"
        hosts.write_text("\n".join([*others, f"10.99.0.{number} {node}"]) + "\n")
        as_root(
            bench,
            node,
            f"ip link add mgmt0 type veth peer name mgmt1 && ip address add 10.99.0.{number}/24 dev mgmt0"
            f" && ip link set mgmt0 up && ip link set mgmt1 up && mount --bind {hosts} /etc/hosts",
        )
    yield good
    for node in nodes:
        as_root(bench, node, "umount /etc/hosts; ip link delete mgmt0")


def test_nodes_with_names_on_another_network_find_each_other(bench, two_networks):
    run = bench.submit("mgmt", task="probe:Watched", train__timeout=300, restarts__crash=0)
    assert bench.wait_for_end(run) == "COMPLETED", bench.story(run)
    first, second = two_networks
    for rank, good in enumerate((first, second)):
        peers = set(bench.facts(rank)["peers"])
        assert peers & {first, second} - {good}
        assert bench.facts(rank)["environ"]["GLOO_SOCKET_IFNAME"] == "eth0"


@pytest.fixture
def names_that_do_not_resolve(bench: Bench) -> Iterator[None]:
    """Nodes without a resolver for any node name, including their own host name."""
    nodes = bench.slurm.nodes[:2]
    hosts = bench.folder / "hosts"
    hosts.write_text("127.0.0.1 localhost\n")
    for node in nodes:
        as_root(bench, node, f"hostname unknown-{node} && mount --bind {hosts} /etc/hosts")
    yield
    for node in nodes:
        as_root(bench, node, f"hostname {node}; umount /etc/hosts")


def test_nodes_whose_names_do_not_resolve_find_each_other(bench, names_that_do_not_resolve):
    for name in ("node2", "unknown-node2"):
        asked = bench.slurm.run(["getent", "hosts", name], host="node1", check=False)
        assert asked.returncode != 0
    run = bench.submit("nameless", task="probe:Watched", train__timeout=300, restarts__crash=0)
    assert bench.wait_for_end(run) == "COMPLETED", bench.story(run)
    assert bench.facts(1)["host"] == "unknown-node2"
    assert bench.facts(1)["environ"]["GLOO_SOCKET_IFNAME"] == "eth0"


@pytest.fixture
def fabric(bench: Bench) -> Iterator[str]:
    """The name of node1 on a second network of the nodes."""
    text = bench.slurm.run(["cat", "/etc/hosts"]).stdout
    hosts = bench.folder / "hosts"
    hosts.write_text(f"{text}10.98.0.1 node1i\n10.98.0.2 node2i\n")
    nodes = bench.slurm.nodes[:2]
    for number, node in enumerate(nodes, 1):
        line = f"ip address add 10.98.0.{number}/24 dev eth0 && mount --bind {hosts} /etc/hosts"
        as_root(bench, node, line)
    yield "node1i"
    for number, node in enumerate(nodes, 1):
        as_root(bench, node, f"umount /etc/hosts; ip address del 10.98.0.{number}/24 dev eth0")


@pytest.mark.slow
def test_the_variables_of_the_job_select_the_rendezvous(bench, fabric):
    place = {"MASTER_ADDR": fabric, "MASTER_PORT": "23456"}
    run = bench.submit("told", task="probe:Watched", job__env=place, restarts__crash=0)
    assert bench.wait_for_end(run) == "COMPLETED", bench.story(run)
    for rank in range(2):
        environ = bench.facts(rank)["environ"]
        assert {name: environ[name] for name in place} == place
    # The connection to rank 0's store uses the network of that name on node2.
    assert "10.98.0.1" in bench.facts(1)["peers"]


@pytest.mark.slow
def test_a_script_finds_rank_0_over_another_network(bench, two_networks):
    (bench.folder / "train.py").write_text(
        "import os, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "total = torch.ones(1)\n"
        "dist.all_reduce(total)\n"
        "print(int(total), 'ranks met', os.environ['GLOO_SOCKET_IFNAME'])\n"
    )
    settings = bench.settings(train__timeout=300, restarts__crash=0)
    settings = [
        word for word in settings if word.split("=")[0].split(".")[0] in ("job", "restarts")
    ]
    command = [bench.slurm.python, "train.py"]
    bench.hpcrun("submit", "--name", "script", "--no-snapshot", *settings, "--", *command)
    run = bench.run("script")
    assert bench.wait_for_end(run) == "COMPLETED", bench.story(run)
    logs = run.attempt_logs(Attempt(bench.job(run), 0))
    told = [(logs / f"rank-{rank:05d}.log").read_text() for rank in range(2)]
    assert all("2 ranks met eth0" in text for text in told), told


def test_the_interface_is_used_or_its_absence_is_one_line(bench):
    run = bench.submit("named", task="probe:Watched", job__interface="eth")
    assert bench.wait_for_end(run) == "COMPLETED", bench.story(run)
    seen = bench.facts(1)["environ"]
    assert (seen["GLOO_SOCKET_IFNAME"], seen["NCCL_SOCKET_IFNAME"]) == ("eth0", "eth")
    lacking = bench.submit("lacking", job__interface="ib0", restarts__crash=0)
    assert bench.wait_for_end(lacking) == "FAILED"
    assert "node1: job.interface=ib0 names no interface" in bench.result(lacking)["reason"]
    assert "it has eth0 (" in bench.result(lacking)["reason"]


def test_unusable_gpus_end_the_run_with_one_line(bench):
    """Slurm allocates the dev cluster's GPUs, but torch in the tests is built for CPUs."""
    given = {"job.cpu": False, "job.gpus": 2}
    blind = bench.submit("blind", **given, **{"job.container": ["env", "CUDA_VISIBLE_DEVICES="]})
    wrong = bench.submit("wrong", **given)
    for run, line in (
        (
            blind,
            "Slurm gave this job 2 GPU(s) here, and none is visible (CUDA_VISIBLE_DEVICES is ''",
        ),
        (wrong, "is built without CUDA and ROCm; install a build with one of them"),
    ):
        assert bench.wait_for_end(run) == "FAILED", bench.story(run)
        assert line in bench.result(run)["reason"], bench.story(run)
        # If the ranks of a node end before their check, the job starts again.
        assert bench.causes(run) in (["bad-input"], ["crash", "bad-input"])
