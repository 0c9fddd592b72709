"""The resources of a cluster, as Slurm 22.05 printed them for nodes and partitions of several kinds."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hpcrun.slurm.nodes import (
    PartitionLimits,
    gpu_types,
    parse_gres,
    parse_limits,
    parse_nodes,
    parse_partitions,
)

Recorded = Callable[[str], str]


def test_a_node_has_its_cpus_memory_gpus_and_partitions(recorded: Recorded) -> None:
    nodes = parse_nodes(recorded("22.05/show-nodes.txt"))
    assert [node.name for node in nodes] == ["node1", "node2", "node3"]
    first, second, third = nodes
    assert (first.cpus, first.threads_per_core, first.memory) == (64, 1, 512000)
    assert (first.gpus, second.gpus, third.gpus) == ((("a100", 4),), (("h100", 8),), ())
    assert first.partitions == {"gpu", "given"}
    assert (first.gpu_count(), first.gpu_count("A100"), first.gpu_count("h100")) == (4, 4, 0)
    assert gpu_types(nodes) == ["a100", "h100"]


def test_what_a_node_keeps_for_itself_is_not_offered() -> None:
    line = (
        "NodeName=n1 CPUEfctv=62 CPUTot=64 Gres=gpu:4 RealMemory=1000 ThreadsPerCore=2 "
        "MemSpecLimit=100 ActiveFeatures=a100,nvlink Partitions=gpu Comment=RealMemory=5\n"
    )
    (node,) = parse_nodes(line)
    assert (node.cpus, node.memory, node.threads_per_core) == (62, 900, 2)
    assert node.features == {"a100", "nvlink"}


def test_partitions_tell_limits_and_defaults(recorded: Recorded) -> None:
    found = {one.name: one for one in parse_partitions(recorded("22.05/show-partitions.txt"))}
    assert [name for name, one in found.items() if one.default] == ["cpu"]
    assert [name for name, one in found.items() if one.exclusive] == ["whole"]
    assert found["cpu"].limits == PartitionLimits()
    assert found["gpu"].limits == PartitionLimits(max_mem_per_cpu=4000)
    assert found["given"].limits == PartitionLimits(def_cpu_per_gpu=3, def_mem_per_gpu=5000)
    assert found["whole"].limits == PartitionLimits(max_cpus_per_node=32)


def test_the_cluster_has_its_own_limits(recorded: Recorded) -> None:
    assert parse_limits(recorded("22.05/show-config-limits.txt")) == PartitionLimits(
        max_mem_per_node=500000
    )


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [
        ("(null)", ()),
        ("", ()),
        ("gpu:4", (("", 4),)),
        ("gpu:a100:4(S:0-1),nvme:1", (("a100", 4),)),
        ("gpu:a100:4(S:0,2),gpu:1g.10gb:14(S:0)", (("a100", 4), ("1g.10gb", 14))),
        ("gpu:no_consume:4", (("", 4),)),
        ("gpu:tesla:no_consume:4", (("tesla", 4),)),
        ("craynetwork:4,shard:8", ()),
    ],
)
def test_gpus_are_read_from_every_form_of_a_gres(
    gres: str, gpus: tuple[tuple[str, int], ...]
) -> None:
    assert parse_gres(gres) == gpus
