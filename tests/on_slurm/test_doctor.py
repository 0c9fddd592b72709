"""Runs that a real Slurm cluster breaks: the first line of `hpcrun doctor` names the cause."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hpcrun.run.directory import RunDirectory
from tests.support import jobs

from . import cluster
from .cluster import FINAL_STATES, PATIENCE
from .conftest import unavailable
from .training import Bench

pytestmark = [pytest.mark.slurm, pytest.mark.slow]
BROKEN = Path(__file__).parents[1] / "cli" / "broken.py"
# Slurm ends a step that exceeds its memory; the dev cluster has no cgroups.
WATCH_MEMORY = (
    ("JobAcctGatherType", "jobacct_gather/linux"),
    ("JobAcctGatherParams", "OverMemoryKill"),
    ("JobAcctGatherFrequency", "1"),
)
NO_RESTARTS = ("crash", "node_failure", "preemption", "time_limit", "hang")


@pytest.fixture(scope="module")
def two() -> Iterator[cluster.SlurmCluster]:
    """A cluster of two hosts that limits the memory of a job."""
    reason = cluster.why_not()
    if reason is not None:
        unavailable(reason)
    name = f"pytest-doctor-{os.getpid()}"
    try:
        yield cluster.start(name, nodes=2, settings=WATCH_MEMORY)
    finally:
        cluster.stop(name)


@pytest.fixture
def bench(two: cluster.SlurmCluster) -> Iterator[Bench]:
    """A folder with the script that fails."""
    place = Bench(two)
    (place.folder / "broken.py").write_bytes(BROKEN.read_bytes())
    yield place
    two.heal()
    place.remove()


def submit(bench: Bench, way: str, *settings: str) -> RunDirectory:
    """Submit the script without restarts; return its run."""
    shape = ("--nodes", "2", "--gpus", "1", "--cpu", "--executor", "slurm", "--detach")
    allowed = [f"restarts.{cause}=0" for cause in NO_RESTARTS]
    command = ("--", sys.executable, "broken.py", way)
    bench.hpcrun("submit", *shape, "--name", way, *allowed, "job.mem=1G", *settings, *command)
    return bench.run(way)


def diagnose(bench: Bench, run: RunDirectory) -> tuple[dict[str, Any], str]:
    """Wait for the end of the job; return the doctor's finding and its first line."""
    bench.slurm.wait_state(bench.job(run), FINAL_STATES, PATIENCE)
    bench.wait_until(lambda: jobs.events(run, "ended") != [], PATIENCE, lambda: bench.story(run))
    told = bench.hpcrun("doctor", run.path.name, "--json", check=False)
    assert told.returncode == 1, told.stdout + told.stderr + bench.story(run)
    plain = bench.hpcrun("doctor", run.path.name, check=False)
    return json.loads(told.stdout), plain.stdout.splitlines()[0]


@pytest.mark.parametrize(
    ("way", "cause", "rank"),
    [
        ("killed", "rank-killed", 1),
        ("segmentation", "segmentation-fault", 1),
        ("disk", "disk-full", None),
        ("memory", "host-out-of-memory", None),
        ("files", "too-many-files", None),
        ("module", "module-missing", 1),
        ("port", "port-in-use", None),
        ("world", "ranks-missing", 0),
        ("hang", "collective-timeout", 0),
        ("collectives", "collectives-differ", None),
        ("model", "checkpoint-other-model", None),
    ],
)
def test_the_doctor_names_the_failure_of_a_script(
    bench: Bench, way: str, cause: str, rank: int | None
) -> None:
    found, line = diagnose(bench, submit(bench, way))
    assert found["id"] == cause, found
    assert rank is None or found["rank"] == rank, found
    assert found["cause"] in line


def wait_for_start(bench: Bench, run: RunDirectory) -> None:
    """Wait until the ranks run."""
    bench.wait_until(lambda: jobs.events(run, "started") != [], PATIENCE, lambda: bench.story(run))


def preempt(bench: Bench, run: RunDirectory) -> None:
    """Preempt the job by an urgent job."""
    urgent = ("-p", "urgent", "-N2", "--exclusive", "--output=/dev/null", "--wrap", "sleep 1")
    bench.slurm.wait_state(bench.slurm.sbatch(*urgent), timeout=PATIENCE)


def fail_node(bench: Bench, run: RunDirectory) -> None:
    """Take the second node from the job."""
    bench.slurm.set_node_down("node2")


def cancel(bench: Bench, run: RunDirectory) -> None:
    """Cancel the job, as its user does."""
    bench.slurm.run(["scancel", bench.job(run)])


def wait(bench: Bench, run: RunDirectory) -> None:
    """Leave the run to its limits."""


@pytest.mark.parametrize(
    ("way", "settings", "act", "cause"),
    [
        ("sleep", (), preempt, "slurm-preempted"),
        ("sleep", (), fail_node, "slurm-node-failure"),
        ("sleep", (), cancel, "slurm-cancelled"),
        ("sleep", ("job.time=1", "job.signal_lead=20"), wait, "slurm-time-limit"),
        ("greedy", ("job.mem=200M",), wait, "slurm-memory-limit"),
    ],
    ids=["preempted", "node failure", "canceled", "time limit", "memory limit"],
)
def test_the_doctor_names_the_failure_of_a_job(
    bench: Bench,
    way: str,
    settings: tuple[str, ...],
    act: Callable[[Bench, RunDirectory], None],
    cause: str,
) -> None:
    run = submit(bench, way, *settings)
    wait_for_start(bench, run)
    act(bench, run)
    found, line = diagnose(bench, run)
    assert found["id"] == cause, found
    assert found["cause"] in line


@pytest.fixture
def loopback_names(bench: Bench) -> Iterator[None]:
    """Hosts with a name that resolves to their loopback address."""
    text = bench.slurm.run(["cat", "/etc/hosts"]).stdout
    for node in bench.slurm.nodes:
        others = [line for line in text.splitlines() if line.split()[1:] != [node]]
        hosts = bench.folder / f"hosts-{node}"
        hosts.write_text("\n".join([*others, f"127.0.1.1 {node}"]) + "\n")
        line = f"mount --bind {hosts} /etc/hosts"
        bench.slurm.run(["sh", "-c", line], host=node, user="root")
    yield
    for node in bench.slurm.nodes:
        bench.slurm.run(["umount", "/etc/hosts"], host=node, user="root")


def test_the_doctor_names_a_loopback_host_name(bench: Bench, loopback_names: None) -> None:
    found, line = diagnose(bench, submit(bench, "loopback"))
    assert found["id"] == "loopback-host-name", found
    assert found["cause"] in line
