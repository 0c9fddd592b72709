"""Two clusters that share a file system give one number to two jobs of one run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hpcrun.run.files import read_json, read_lines
from tests import jobs

from .cluster import SlurmCluster
from .scripts import ENDED, SBATCH, Bench
from .separate_cluster import running

pytestmark = [pytest.mark.slurm, pytest.mark.slow]
SHAPE = ("--nodes=2", "--ntasks-per-node=1")


@pytest.fixture
def other() -> Iterator[SlurmCluster]:
    """A second cluster with another controller and other nodes, which sees the same folders."""
    yield from running("twin", nodes=2)


def next_job_id(cluster: SlurmCluster) -> int:
    """The number that the controller gives to the next job."""
    lines = cluster.admin("scontrol", "show", "config").splitlines()
    return next(int(line.split("=")[1]) for line in lines if line.startswith("NEXT_JOB_ID"))


def count_up(cluster: SlurmCluster, number: int) -> None:
    """Submit and cancel jobs until the next job has ``number``."""
    while next_job_id(cluster) < number:
        job = cluster.sbatch("--hold", "--wrap", "true", cwd=cluster.shared, env={})
        cluster.admin("scancel", job)


def test_a_second_job_with_the_same_number_changes_nothing(
    slurm: SlurmCluster, other: SlurmCluster
) -> None:
    bench = Bench(slurm)
    calm = bench.prepare("calm")
    bench.wait_for_end(bench.sbatch(*SHAPE, str(SBATCH / "train.sbatch"), "runs/calm"))
    run = bench.prepare("same", model__pause=0.2)
    number = max(next_job_id(slurm), next_job_id(other))
    for cluster in (slurm, other):
        count_up(cluster, number)
    arguments = (*SHAPE, str(SBATCH / "train.sbatch"), "runs/same")
    first = other.sbatch(*arguments, cwd=bench.folder, env=bench.environment())
    with bench.held_at(run, 5):
        second = bench.sbatch(*arguments)
        assert first == second == str(number)
        bench.wait_for_end(second, "FAILED")
        assert f"job {number} of cluster {other.name} already used this number" in bench.told(run)
    other.wait_until(
        lambda: other.state(first) == "COMPLETED",
        ENDED,
        lambda: f"job {first} is {other.state(first)}: {bench.told(run)}",
    )
    owner = read_json(run.owner)
    assert owner is not None
    assert owner["cluster"] == other.name
    assert [event.cause for event in jobs.events(run, "ended")] == ["finished"], bench.told(run)
    steps = [line["step"] for line in read_lines(run.metrics)]
    assert steps == sorted(steps), bench.told(run)
    assert jobs.final_state(run) == jobs.final_state(calm)
