"""Requests for resources on a cluster that was recorded with Slurm 22.05."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hpcrun.config import Job
from hpcrun.errors import LaunchError
from hpcrun.slurm.commands import given_option
from hpcrun.slurm.launch.batch_script import sbatch_lines
from hpcrun.slurm.launch.resources import CpuAndMemory, fitted, gpu_request, node_share
from hpcrun.slurm.nodes import (
    NodeResources,
    Offer,
    PartitionLimits,
    parse_limits,
    parse_nodes,
    parse_partitions,
)

RECORDED = Path(__file__).parents[1] / "recorded"


def text(name: str) -> str:
    return (RECORDED / "22.05" / f"{name}.txt").read_text()


OFFER = Offer(
    parse_nodes(text("show-nodes")),
    parse_partitions(text("show-partitions")),
    parse_limits(text("show-config")),
)
WITHOUT_GRES = replace(OFFER, nodes=tuple(replace(node, gpus=()) for node in OFFER.nodes))
UNTYPED = replace(OFFER, nodes=tuple(replace(n, gpus=(("", 4),)) for n in OFFER.nodes[:2]))


def gpu_lines(job: Job) -> list[str]:
    """Return the ``#SBATCH`` lines that request GPUs."""
    lines = sbatch_lines(Path("/runs/a"), job)
    return [line.removeprefix("#SBATCH ") for line in lines if "gpu" in line]


@pytest.mark.parametrize(
    ("asked", "lines"),
    [
        ({}, ["--gpus-per-node=4"]),
        ({"gpu_type": "a100"}, ["--gpus-per-node=a100:4"]),
        ({"gpu_request": "gres"}, ["--gres=gpu:4"]),
        ({"gpu_request": "gres", "gpu_type": "a100"}, ["--gres=gpu:a100:4"]),
        ({"gpu_request": "none"}, []),
        ({"cpu": True, "gpu_type": "a100"}, []),
    ],
)
def test_gpus_are_asked_for_in_the_sites_form(asked: dict[str, object], lines: list[str]) -> None:
    assert gpu_lines(Job.model_validate({"gpus": 4, **asked})) == lines


@pytest.mark.parametrize(
    ("offer", "form"),
    [(None, "gpus-per-node"), (OFFER, "gpus-per-node"), (WITHOUT_GRES, "none")],
)
def test_the_form_follows_from_what_the_nodes_have(offer: Offer | None, form: str) -> None:
    assert gpu_request(Job(), offer) == form
    assert gpu_request(Job(gpu_request="gres"), offer) == "gres"


@pytest.mark.parametrize(
    "option", ["--gres=gpu:a100:2", "-G2", "--gpus=2", "--gpus-per-node=2", "--gpus-per-task=1"]
)
def test_a_request_in_other_words_is_not_contradicted(option: str) -> None:
    assert gpu_request(Job(sbatch_args=[option]), OFFER) == "none"
    assert gpu_request(Job(sbatch_args=["--gres=fpga:1"]), OFFER) == "gpus-per-node"


def test_a_missing_gpu_type_is_refused_with_those_present() -> None:
    def refusal(offer: Offer, **keys: object) -> str:
        with pytest.raises(LaunchError) as told:
            fitted(Job.model_validate({"gpu_type": "v100", **keys}), lambda: offer)
        return str(told.value)

    assert "this cluster has GPUs of type v100; there are: a100, h100" in refusal(OFFER)
    assert "partition given has GPUs of type v100; there are: a100" in refusal(
        OFFER, partition="given"
    )
    assert "have no type; omit v100" in refusal(UNTYPED)
    assert "are not known to Slurm; omit v100" in refusal(WITHOUT_GRES)
    assert fitted(Job(gpu_type="v100"), lambda: None)[0].gpu_type == "v100"
    assert fitted(Job(gpu_type="A100"), lambda: OFFER)[0].gpu_type == "a100"


def test_more_gpus_than_a_node_has_are_refused() -> None:
    for keys, most in (({}, 8), ({"partition": "given"}, 4)):
        with pytest.raises(LaunchError, match=f"16 per node, but a node has at most {most};"):
            fitted(Job.model_validate({"gpus": 16, **keys}), lambda: OFFER)
    # The user's own request, and a cluster without GPUs, are Slurm's matter.
    for job, offer in ((Job(gpus=16, sbatch_args=["-G16"]), OFFER), (Job(gpus=16), WITHOUT_GRES)):
        assert fitted(job, lambda offer=offer: offer)[0].gpus == 16


@pytest.mark.parametrize(
    ("job", "share"),
    [
        # Memory: 64 CPUs for 8 GPUs are 8 per rank, at 4000 MB each; the limit of the partition.
        ({"partition": "gpu", "gpus": 4}, CpuAndMemory(8, 128000)),
        ({"partition": "gpu", "gpus": 2, "gpu_type": "a100"}, CpuAndMemory(16, 128000)),
        # Only the node with eight GPUs can run this job.
        ({"partition": "gpu", "gpus": 8}, CpuAndMemory(8, 256000)),
        ({"partition": "given"}, None),
        ({"partition": "whole", "gpus": 4}, CpuAndMemory(4, None)),
        # The default partition has no GPUs.
        ({}, None),
        ({"partition": "gpu", "gpus": 9}, None),
        ({"partition": "gpu", "node_share": False}, None),
        ({"partition": "gpu", "cpus_per_task": 2}, None),
        ({"partition": "gpu", "mem": "1G"}, None),
        ({"partition": "gpu", "exclusive": True}, None),
        ({"partition": "gpu", "sbatch_args": ["-c4"]}, None),
        ({"partition": "gpu", "sbatch_args": ["--mem-per-gpu=4G"]}, None),
        ({"partition": "gpu", "sbatch_args": ["--comment=--mem"]}, CpuAndMemory(8, 32000)),
        ({"sbatch_args": ["-pgpu"]}, CpuAndMemory(8, 32000)),
        ({"partition": "gpu", "constraint": "infiniband"}, None),
    ],
)
def test_a_job_gets_its_gpus_share_of_the_smallest_node(
    job: dict[str, object], share: CpuAndMemory | None
) -> None:
    assert node_share(Job.model_validate(job), OFFER) == share


def node(**changes: object) -> NodeResources:
    whole = NodeResources("n", 128, 2, 1000, (("", 4),), frozenset({"a"}), frozenset({"gpu"}))
    return replace(whole, **changes)  # type: ignore[arg-type]


def share_of(*nodes: NodeResources, **job: object) -> CpuAndMemory | None:
    """Return the share on a cluster of ``nodes`` in a partition without limits."""
    plain = replace(OFFER.partitions[1], limits=PartitionLimits())
    asked = Job.model_validate({"partition": "gpu", **job})
    return node_share(asked, Offer(nodes, (plain,), PartitionLimits()))


def test_shares_are_whole_cores_of_what_every_node_has() -> None:
    assert share_of(node(), gpus=4) == CpuAndMemory(32, 1000)
    # 62 threads of 31 cores: 15 each would need 8 cores per rank, and 32 in all.
    assert share_of(node(cpus=62), gpus=4) == CpuAndMemory(14, 1000)
    assert share_of(node(), node(cpus=16, memory=2000), gpus=2) == CpuAndMemory(4, 500)
    assert share_of(node(), node(features=frozenset(), cpus=16), constraint="a") == CpuAndMemory(
        32, 250
    )
    assert share_of(node(cpus=2, memory=1)) is None


def test_a_cpu_job_is_left_unchanged() -> None:
    def ask(_: str | None) -> Offer:
        raise AssertionError("Slurm was asked")

    job = Job(cpu=True)
    assert fitted(job, ask) == (job, [])


def test_each_decision_is_printed_in_one_line() -> None:
    job, lines = fitted(Job(partition="gpu", gpus=2), lambda: OFFER)
    assert (job.gpu_request, job.cpus_per_task, job.mem) == ("gpus-per-node", 8, "64000M")
    assert lines == [
        "requests 8 CPUs per rank and 64000M of memory per node, the GPUs' share of the smallest node "
        "(job.node_share=false leaves this to the site)"
    ]
    job, (line,) = fitted(Job(gpus=2), lambda: WITHOUT_GRES)
    assert job.gpu_request == "none"
    assert "no GPUs are requested from Slurm" in line


def test_a_task_of_several_ranks_gets_all_their_resources() -> None:
    one = Job(partition="gpu", gpus=4, tasks_per_node=1)
    job, (line,) = fitted(one, lambda: OFFER)
    assert (job.cpus_per_task, job.mem) == (32, "128000M")
    assert "requests 8 CPUs per rank" in line
    launched = Job(partition="gpu", gpus=4, launcher="torchrun")
    job, _ = fitted(launched, lambda: OFFER)
    assert "#SBATCH --cpus-per-task=32" in sbatch_lines(Path("/runs/a"), job)
    assert "#SBATCH --ntasks-per-node=1" in sbatch_lines(Path("/runs/a"), job)
    for cpu in (one, launched):
        job, _ = fitted(cpu.model_copy(update={"cpu": True}), lambda: OFFER)
        assert "#SBATCH --cpus-per-task=4" in sbatch_lines(Path("/runs/a"), job)


def test_options_are_found_in_all_their_forms() -> None:
    assert given_option(["--mem=4G"], "mem") == "4G"
    assert given_option(["-c 4"], "cpus-per-task", "c") == "4"
    assert given_option(["-c4", "--cpus-per=8"], "cpus-per-task", "c") == "8"
    assert given_option(["--exclusive"], "exclusive") == ""
    assert given_option(["--exclude=n1"], "exclusive") is None
    assert given_option(["--gres-flags=x"], "gres") is None
    for given, longer in (
        ("--mem=1G", "mem-per-cpu"),
        ("--gpus=2", "gpus-per-node"),
        ("--ntasks=2", "ntasks-per-node"),
    ):
        assert given_option([given], longer) is None
