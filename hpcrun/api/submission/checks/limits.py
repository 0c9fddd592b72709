"""Check of a job's requests against the limits that the scheduler publishes.

Nothing is refused here: a QOS may lift the limits of a partition, and a site may move jobs to another.
sbatch itself refuses what it can never start.
"""

import difflib
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from hpcrun.api.submission.checks.concern import Concern, Submission
from hpcrun.config import Job

if TYPE_CHECKING:
    from hpcrun.slurm.nodes import NodeResources, Offer, Partition

_SHOWN = 12
# Less memory than the import of torch needs, and less time than a start and a save.
_LEAST_MIB = 1024
_LEAST_MINUTES = 3
_MIB = {"K": 2**-10, "M": 1, "G": 2**10, "T": 2**20}


def beyond_the_partition(submission: Submission) -> Iterator[Concern]:
    """Find a partition that does not exist, and requests beyond the limits of all given partitions."""
    job, offer = submission.config.job, submission.offer
    if offer is None or not offer.partitions:
        return
    from hpcrun.slurm.launch.resources import partition_names, partitions_for

    known = [partition.name for partition in offer.partitions]
    missing = [name for name in partition_names(job) or () if name not in known]
    shown = [partition.name for partition in offer.visible]
    for name in missing:
        near = difflib.get_close_matches(name, shown, n=1)
        meant = f"did you mean {near[0]}? " if near else ""
        listed = ", ".join(shown[:_SHOWN]) + (" …" if len(shown) > _SHOWN else "")
        yield Concern(
            f"Slurm lists no partition {name}; {meant}there are: {listed}", "job.partition"
        )
    partitions = partitions_for(job, offer)
    if missing or not partitions:
        return
    yield from _of_time(job, partitions, offer)
    yield from _of_nodes(job, partitions, offer)
    names = {partition.name for partition in partitions}
    nodes = [node for node in offer.nodes if names & node.partitions]
    if nodes:
        yield from _of_a_node(job, partitions, nodes)


def likely_units(submission: Submission) -> Iterator[Concern]:
    """Find a memory and a time that were probably meant in another unit than Slurm reads."""
    job = submission.config.job
    if job.mem is not None and job.mem.isdecimal() and 0 < int(job.mem) < _LEAST_MIB:
        yield Concern(
            f"{job.mem} is {job.mem} megabytes for Slurm; write --mem {job.mem}G for gigabytes",
            "job.mem",
        )
    minutes, seconds = divmod(job.time_seconds or 0, 60)
    if 0 < minutes <= _LEAST_MINUTES and not seconds:
        yield Concern(
            f"{minutes} is minutes for Slurm; write --time {minutes}:00:00 for hours, {minutes}-0 for days",
            "job.time",
        )


def _of_time(job: Job, partitions: "Sequence[Partition]", offer: "Offer") -> Iterator[Concern]:
    limits = [partition.max_seconds for partition in partitions]
    most = max((limit for limit in limits if limit is not None), default=0)
    asked = job.time_seconds
    if asked is None or None in limits or asked <= most:
        return
    others = [
        one.name for one in offer.visible if one.max_seconds is None or one.max_seconds >= asked
    ]
    yield Concern(
        f"{job.time} is more than the limit of {_names(partitions)}, {_clock(most)}, so the job may never "
        f"start; use --time {_clock(most)}{_or_partition(others)}",
        "job.time",
    )


def _of_nodes(job: Job, partitions: "Sequence[Partition]", offer: "Offer") -> Iterator[Concern]:
    limits = [partition.max_nodes for partition in partitions]
    most = max((limit for limit in limits if limit is not None), default=0)
    asked = job.min_nodes + job.spares
    if None in limits or asked <= most:
        return
    others = [one.name for one in offer.visible if one.max_nodes is None or one.max_nodes >= asked]
    spares = f" with {job.spares} spare nodes" if job.spares else ""
    yield Concern(
        f"{job.nodes}{spares} is more than a job can have in {_names(partitions)}, {most}, so the job may "
        f"never start; use --nodes {max(1, most - job.spares)}{_or_partition(others)}",
        "job.nodes",
    )


def _of_a_node(
    job: Job, partitions: "Sequence[Partition]", nodes: "Sequence[NodeResources]"
) -> Iterator[Concern]:
    cpus, place = max(node.cpus for node in nodes), _names(partitions)
    limits = [partition.limits.max_cpus_per_node or cpus for partition in partitions]
    cpus = min(cpus, max(limits))
    asked = (job.cpus_of_task or 1) * job.tasks_on_node
    if asked > cpus:
        remedy = f"use --cpus-per-task {max(1, cpus // max(1, job.gpus))}"
        if job.gpus > cpus:
            remedy = f"use --gpus {cpus}, or fewer"
        yield Concern(
            f"{asked} CPUs per node, for {job.gpus} rank{'s' * (job.gpus > 1)}, are more than a node of "
            f"{place} has, {cpus}, so the job may never start; {remedy}",
            "job.cpus_per_task" if job.cpus_per_task else "job.gpus",
        )
    memory = max(node.memory for node in nodes)
    if job.mem is not None and memory > 1:
        number, unit = re.fullmatch(r"(\d+)([KMGT]?)", job.mem).groups()  # type: ignore[union-attr]
        if int(number) * _MIB[unit or "M"] > memory:
            yield Concern(
                f"{job.mem} is more than a node of {place} has, {memory}M, so the job may never start; use "
                f"--mem {memory}M or less",
                "job.mem",
            )


def _names(partitions: "Sequence[Partition]") -> str:
    names = ", ".join(partition.name for partition in partitions)
    return f"partition{'s' if len(partitions) > 1 else ''} {names}"


def _or_partition(names: Sequence[str]) -> str:
    return f", or --partition {' or '.join(names[:3])}" if names else ""


def _clock(seconds: int) -> str:
    days, rest = divmod(seconds, 86400)
    clock = f"{rest // 3600:02d}:{rest // 60 % 60:02d}:{rest % 60:02d}"
    return f"{days}-{clock}" if days else clock
