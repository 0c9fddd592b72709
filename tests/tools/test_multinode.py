"""Two hosts without Slurm, as network namespaces, train one run: started, killed, interrupted, continued."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from hpcrun.run.directory import RunDirectory
from tests.network.two_hosts import HOSTS, two_hosts
from tests.support import jobs

TOOL = Path(__file__).resolve().parents[2] / "tools" / "train_multinode.sh"
STEPS = {
    **{"train.steps": 12, "optim.warmup_steps": 2, "checkpoint.every": 4},
    "model.pause": 0.05,
}
PORT = "23456"


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[list[str]]]:
    """Give the words before a command on each host, whose own names lead to loopback, as on Debian."""
    with two_hosts((None, None)) as found:
        for words in found:
            (Path("/etc/netns") / words[-1] / "hosts").write_text(
                f"127.0.0.1 localhost\n127.0.1.1 {os.uname().nodename}\n"
            )
        yield found


class Pair:
    """Two hosts and a folder that both see."""

    def __init__(self, hosts: list[list[str]], folder: Path) -> None:
        self.hosts, self.folder = hosts, folder
        self.run = RunDirectory(folder / "runs" / "pair")
        jobs.write_probe(folder)
        (folder / "empty.yaml").write_text("{}\n")

    def begin(
        self, host: int, *words: str, node: int | None = None, **changes: object
    ) -> subprocess.Popen[str]:
        """Run the tool on a host, in its own process group as a terminal does."""
        settings = [
            word for word in jobs.probe_config(self.folder, **STEPS | changes) if word[:4] != "job."
        ]
        number = host if node is None else node
        shape = ("--num_gpus=1", f"--node_rank={number}", "--master_addr", HOSTS[0])
        given = (*shape, f"--master_port={PORT}", "--num_nodes", "2", *words)
        what = ("--cpu", "--name=pair", "--no-snapshot", "--config", "empty.yaml", *settings)
        return subprocess.Popen(
            [*self.hosts[host], str(TOOL), *given, *what],
            cwd=self.folder,
            env=os.environ | {"PYTHON": sys.executable, "SLURM_JOB_ID": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )


@pytest.fixture
def pair(hosts: list[list[str]], tmp_path: Path) -> Pair:
    return Pair(hosts, tmp_path)


def ends(*started: subprocess.Popen[str]) -> list[tuple[int, str]]:
    """Wait for the hosts; return exit codes and outputs."""
    told = [one.communicate(timeout=jobs.PATIENCE)[0] for one in started]
    return [(one.returncode, text) for one, text in zip(started, told, strict=True)]


def kill_rank(run: RunDirectory, number: int) -> None:
    """Send SIGKILL to a rank of the run."""
    ranks = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            if words[-2:] == ["hpcrun.worker", str(run.path)] and "--nnodes=2" not in words:
                ranks += [process] if process.environ()["RANK"] == str(number) else []
    assert ranks
    for process in ranks:
        process.kill()


def require_calm_weights(pair: Pair, *causes: str) -> None:
    """Continue the run to its end, and compare its weights with those of an undisturbed run."""
    told = ends(pair.begin(1), pair.begin(0))
    assert [code for code, _ in told] == [0, 0], told
    assert jobs.outcome(pair.run) == ("finished", [*causes, "finished"])
    calm = jobs.submit_probe(pair.folder, "calm", **STEPS, job__nodes=1)
    jobs.wait_for_end(calm)
    assert jobs.final_state(pair.run) == jobs.final_state(calm)


def test_two_hosts_train_one_run_to_the_same_weights(pair: Pair) -> None:
    # Ctrl-C on one host saves and stops both. A second start of a live run changes nothing.
    first = [pair.begin(1), pair.begin(0)]
    with jobs.held_at(pair.run, 6):
        again = ends(pair.begin(0), pair.begin(1))
        os.killpg(first[0].pid, signal.SIGINT)
    assert all(code for code, _ in ends(*first))
    for code, text in again:
        assert code == 2, text
        assert "running already" in text or "has it already" in text
    require_calm_weights(pair, "cancelled")


# CI kills a rank of torchrun on one host.
@pytest.mark.slow
def test_a_killed_rank_ends_both_hosts(pair: Pair) -> None:
    first = [pair.begin(0), pair.begin(1)]
    with jobs.held_at(pair.run, 6):
        kill_rank(pair.run, 1)
    assert all(code for code, _ in ends(*first))
    require_calm_weights(pair, "crash")
    assert all("is finished already" in text for _, text in ends(pair.begin(1), pair.begin(0)))


OWN = """
import os
import torch
import torch.distributed as dist
import hpcrun

rank, world_size, local_rank = hpcrun.setup_distributed()
total = torch.tensor([rank + 1.0])
dist.all_reduce(total)
print(rank, world_size, total.item(), os.environ["GLOO_SOCKET_IFNAME"], flush=True)
hpcrun.cleanup_distributed()
"""


def test_own_scripts_meet_where_host_names_lead_to_loopback(pair: Pair) -> None:
    (pair.folder / "own.py").write_text(OWN)
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1")
    place = (f"--master_addr={HOSTS[0]}", f"--master_port={PORT}")
    started = [
        subprocess.Popen(
            [*pair.hosts[node], *torchrun, *place, f"--node_rank={node}", "own.py"],
            cwd=pair.folder, stdout=subprocess.PIPE, text=True,
        )
        for node in (1, 0)
    ]  # fmt: skip
    assert ends(*started) == [(0, "1 2 3.0 link0\n"), (0, "0 2 3.0 link0\n")]


def test_hosts_that_disagree_end_with_one_line_before_any_rank(pair: Pair) -> None:
    for changes, words, expected in [
        ({"seed": 4}, (), "seed is 3 on node 0 and 4 on node 1 (10.77.0.2)"),
        ({}, ("--num_nodes=3",), "--num_nodes is 2 on node 0 and 3 on node 1 (10.77.0.2)"),
    ]:
        for code, text in ends(pair.begin(0), pair.begin(1, *words, **changes)):
            assert (code, "Traceback" in text) == (2, False), text
            assert expected in text.splitlines()[-1]
    assert not pair.run.path.exists()
    # The second host that calls itself node 0, and a second node 1.
    three = "--num_nodes=3"
    first = pair.begin(0, three)
    second = pair.begin(1, three)
    assert first.stdout is not None
    while "node 1 is 10.77.0.2" not in first.stdout.readline():
        assert first.poll() is None
    (code, text), (twin, other) = ends(pair.begin(1, three, node=0), pair.begin(1, three))
    assert (code, twin) == (2, 2), (text, other)
    assert f"--node_rank 0 is taken by {HOSTS[0]}" in text
    assert "--node_rank 1 is taken by 10.77.0.2" in other
    os.killpg(first.pid, signal.SIGINT)
    (_, _), (code, text) = ends(first, second)
    assert (code, "node 0 was interrupted" in text) == (2, True), text
    assert not pair.run.path.exists()
