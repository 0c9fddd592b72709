"""Requests beyond the limits of a partition get a line with what fits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpcrun.api.submission.checks.concern import Submission
from hpcrun.api.submission.checks.limits import beyond_the_partition, likely_units
from hpcrun.config import Config
from hpcrun.slurm.nodes import Offer, PartitionLimits, parse_nodes, parse_partitions

RECORDED = Path(__file__).parents[2] / "slurm" / "recorded"
PARTITIONS = """\
PartitionName=short Default=YES MaxNodes=UNLIMITED MaxTime=02:00:00 TotalNodes=4 MaxCPUsPerNode=UNLIMITED
PartitionName=long Default=NO MaxNodes=2 MaxTime=7-00:00:00 TotalNodes=8 MaxCPUsPerNode=8
PartitionName=free Default=NO MaxNodes=UNLIMITED MaxTime=UNLIMITED TotalNodes=64
PartitionName=secret AllowGroups=lab Default=NO MaxNodes=1 MaxTime=UNLIMITED TotalNodes=64
PartitionName=shrtt AllowGroups=ALL Hidden=YES MaxNodes=9 MaxTime=01:00:00 TotalNodes=64
"""
NODES = """\
NodeName=n1 CPUTot=16 RealMemory=64000 Partitions=short,long
NodeName=n2 CPUTot=32 RealMemory=256000 Partitions=free
"""
OFFER = Offer(parse_nodes(NODES), parse_partitions(PARTITIONS), PartitionLimits())


def told(offer: Offer | None = OFFER, **job: Any) -> list[str]:
    found = [*beyond_the_partition(Submission(Config(job=job), offer=offer))]
    assert not any(one.refused for one in found)
    return [f"{one.key}: {one.text}" for one in found]


@pytest.mark.parametrize(
    ("job", "parts"),
    [
        ({"time": "12:00:00"}, ["job.time: 12:00:00 is", "short, 02:00:00", "--partition long or f"]),
        ({"time": "8-0", "partition": "long"}, ["partition long, 7-00:00:00", "--partition free"]),
        ({"nodes": 20}, ["job.nodes: 20 is", "partition short, 4", "--nodes 4, or --partition free"]),
        ({"nodes": 3, "partition": "long"}, ["partition long, 2", "--partition short or free"]),
        ({"nodes": 4, "spares": 1}, ["4 with 1 spare nodes", "--nodes 3"]),
        ({"nodes": "5-9", "sbatch_args": ["-pshort"]}, ["5-9 is more", "--partition free"]),
        ({"cpus_per_task": 40}, ["job.cpus_per_task: 40 CPUs", "has, 16", "--cpus-per-task 16"]),
        ({"cpus_per_task": 8, "gpus": 4}, ["32 CPUs per node, for 4 ranks", "--cpus-per-task 4"]),
        ({"gpus": 12, "cpu": True, "partition": "long"}, ["job.gpus: 12 CPUs", "--gpus 8, or"]),
        ({"mem": "100G"}, ["job.mem: 100G is more", "64000M"]),
        ({"partition": "shrt"}, ["job.partition", "no partition shrt", "short? there are: short, long"]),
        ({"partition": "short,x"}, ["no partition x; there are: short, long, free"]),
        ({"partition": "secret", "nodes": 2}, ["partition secret, 1", "--partition short or long or f"]),
        ({"partition": "shrtt", "time": "2:00:00"}, ["partition shrtt, 01:00:00", "short or long or fr"]),
    ],
)  # fmt: skip
def test_a_request_that_does_not_fit_gets_a_line(job: dict[str, Any], parts: list[str]) -> None:
    (line,) = told(**job)
    for part in parts:
        assert part in line


@pytest.mark.parametrize(
    ("job", "line"),
    [
        ({"mem": "64"}, "job.mem: 64 is 64 megabytes for Slurm; write --mem 64G for gigabytes"),
        ({"time": "2"}, "job.time: 2 is minutes for Slurm; write --time 2:00:00 for hours, 2-0 for days"),
        *[({"mem": value}, "") for value in ("64M", "64000", "0")],
        ({"time": "30"}, ""),
        ({"time": "0:01:30"}, ""),
    ],
)  # fmt: skip
def test_a_number_that_means_another_unit_gets_a_line(job: dict[str, Any], line: str) -> None:
    found = [*likely_units(Submission(Config(job=job)))]
    assert [f"{one.key}: {one.text}" for one in found] == ([line] if line else [])
    assert not any(one.refused for one in found)


@pytest.mark.parametrize(
    "job",
    [
        {},
        {"time": "2:00:00", "nodes": 4, "cpus_per_task": 16, "mem": "64000M"},
        {"time": "5-0", "partition": "short,free"},
        {"nodes": "2-20"},
        {"nodes": 64, "partition": "free", "cpus_per_task": 32},
    ],
)
def test_a_request_that_fits_somewhere_is_silent(job: dict[str, Any]) -> None:
    assert told(**job) == []


def test_nothing_is_said_without_known_limits() -> None:
    assert told(None, time="99-0") == []
    assert told(Offer((), (), PartitionLimits()), partition="x") == []
    partitions = parse_partitions((RECORDED / "22.05/show-partitions.txt").read_text())
    assert {(one.max_nodes, one.max_seconds) for one in partitions} == {(1, None), (2, None)}
