"""The nodes and partitions of a cluster, read from the output of ``scontrol``.

``scontrol show nodes``, not sinfo: only scontrol shows the resources that a node reserves for the system
(CPUEfctv, MemSpecLimit). Slurm refuses a job that requests these too.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from hpcrun import slurm

# A type may begin with a digit (2080ti). A number alone is the count.
_GRES = re.compile(
    r"(?:gres[:/])?gpu(?::(?P<type>[^:=]+?))??(?::no_consume)?(?:[:=](?P<count>\d+))?"
)
_BRACKETS = re.compile(r"\([^)]*\)")


@dataclass(frozen=True)
class NodeResources:
    """A node's CPUs and memory (MiB) available to jobs, and its GPUs by type ("" without a type)."""

    name: str
    cpus: int
    threads_per_core: int
    memory: int
    gpus: tuple[tuple[str, int], ...]
    features: frozenset[str]
    partitions: frozenset[str]

    def gpu_count(self, gpu_type: str | None = None) -> int:
        """Return the number of GPUs, or of GPUs of one type; types are compared as in Slurm."""
        wanted = None if gpu_type is None else gpu_type.lower()
        return sum(count for kind, count in self.gpus if wanted in (None, kind.lower()))


@dataclass(frozen=True)
class PartitionLimits:
    """Limits and defaults of a partition or of a whole cluster; memory in MiB, None: no limit."""

    max_cpus_per_node: int | None = None
    max_mem_per_cpu: int | None = None
    max_mem_per_node: int | None = None
    def_cpu_per_gpu: int | None = None
    def_mem_per_gpu: int | None = None


@dataclass(frozen=True)
class Partition:
    """A partition.

    ``exclusive``: its jobs get whole nodes. ``max_nodes``: the most nodes of a job, at most all of the
    partition. ``max_seconds``: its time limit. None: no limit, or not known. ``hidden``: for those who know
    its name, or for other groups.
    """

    name: str
    default: bool
    exclusive: bool
    limits: PartitionLimits
    max_nodes: int | None = None
    max_seconds: int | None = None
    hidden: bool = False


@dataclass(frozen=True)
class Offer:
    """All resources that a job can request on one cluster."""

    nodes: tuple[NodeResources, ...]
    partitions: tuple[Partition, ...]
    limits: PartitionLimits

    @property
    def visible(self) -> list[Partition]:
        """The partitions that Slurm shows to this user."""
        return [partition for partition in self.partitions if not partition.hidden]


def cluster_offer(timeout: float = 10.0) -> Offer | None:
    """Ask this cluster for its resources; None without an answer within ``timeout`` seconds."""
    texts = []
    for command in (
        slurm.scontrol_show_nodes_command(),
        slurm.scontrol_show_partitions_command(),
        ["scontrol", "show", "config"],
    ):
        shown = slurm.run(command, timeout)
        if shown.returncode != 0:
            return None
        texts.append(shown.stdout)
    nodes, partitions, config = texts
    found = parse_partitions(partitions)
    if any(partition.hidden for partition in found):
        shown = slurm.run(slurm.scontrol_show_partitions_command(hide=True), timeout)
        if shown.returncode == 0:
            names = {partition.name for partition in parse_partitions(shown.stdout)}
            found = tuple(replace(one, hidden=one.name not in names) for one in found)
    return Offer(parse_nodes(nodes), found, parse_limits(config))


def parse_nodes(text: str) -> tuple[NodeResources, ...]:
    """Read ``scontrol --oneliner show nodes``; lines of another shape are ignored."""
    return tuple(filter(None, map(_node, text.splitlines())))


def _node(line: str) -> NodeResources | None:
    fields = _fields(line)
    cpus = _number(fields.get("CPUEfctv") or fields.get("CPUTot"))
    if "NodeName" not in fields or not cpus:
        return None
    return NodeResources(
        name=fields["NodeName"],
        cpus=cpus,
        threads_per_core=_number(fields.get("ThreadsPerCore")) or 1,
        memory=(_number(fields.get("RealMemory")) or 0)
        - (_number(fields.get("MemSpecLimit")) or 0),
        gpus=parse_gres(fields.get("Gres", "")),
        features=_words(fields.get("ActiveFeatures", "")),
        partitions=_words(fields.get("Partitions", "")),
    )


def parse_gres(text: str) -> tuple[tuple[str, int], ...]:
    """Return the GPUs by type of a node's ``Gres`` or of a job's ``TresPerNode``.

    ``gpu:a100:4(S:0-1),nvme:1`` is ``(("a100", 4),)``, ``gres/gpu:2`` is ``(("", 2),)``; without a count: 1.
    """
    parts = _BRACKETS.sub("", text).split(",")
    found = filter(None, map(_GRES.fullmatch, parts))
    return tuple((match["type"] or "", int(match["count"] or 1)) for match in found)


def parse_partitions(text: str) -> tuple[Partition, ...]:
    """Read ``scontrol --oneliner show partitions``; what only some groups may use counts as hidden."""
    lines = (_fields(line) for line in text.splitlines())
    return tuple(
        Partition(
            name=fields["PartitionName"],
            default=fields.get("Default") == "YES",
            exclusive=fields.get("OverSubscribe", "").startswith("EXCLUSIVE"),
            limits=_limits(fields),
            max_nodes=min(
                (
                    number
                    for key in ("MaxNodes", "TotalNodes")
                    if (number := _number(fields.get(key))) is not None
                ),
                default=None,
            ),
            max_seconds=slurm.seconds(fields.get("MaxTime", "")),
            hidden=fields.get("Hidden") == "YES" or fields.get("AllowGroups", "ALL") != "ALL",
        )
        for fields in lines
        if "PartitionName" in fields
    )


def parse_limits(text: str) -> PartitionLimits:
    """Read the limits of the whole cluster from ``scontrol show config``."""
    pairs = (line.partition("=") for line in text.splitlines())
    return _limits({name.strip(): value.strip() for name, _, value in pairs})


def _limits(fields: dict[str, str]) -> PartitionLimits:
    words = (word.partition("=") for word in fields.get("JobDefaults", "").split(","))
    defaults = {name: value for name, _, value in words}
    return PartitionLimits(
        max_cpus_per_node=_number(fields.get("MaxCPUsPerNode")),
        max_mem_per_cpu=_number(fields.get("MaxMemPerCPU")),
        max_mem_per_node=_number(fields.get("MaxMemPerNode")),
        def_cpu_per_gpu=_number(defaults.get("DefCpuPerGPU")),
        def_mem_per_gpu=_number(defaults.get("DefMemPerGPU")),
    )


def _fields(line: str) -> dict[str, str]:
    """Return the first value of each key: free text, which could imitate a key, comes last in such a line."""
    fields: dict[str, str] = {}
    for word in line.split():
        key, equals, value = word.partition("=")
        if equals:
            fields.setdefault(key, value)
    return fields


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None


def _words(text: str) -> frozenset[str]:
    return frozenset(word for word in text.split(",") if word not in ("", "(null)"))


def gpu_types(nodes: Iterable[NodeResources]) -> list[str]:
    """Return the types of the nodes' GPUs, sorted."""
    return sorted({kind for node in nodes for kind, _ in node.gpus if kind})


@dataclass(frozen=True)
class NodeRow:
    """A node in one of its partitions: its state from sinfo, CPUs, memory (MiB), and generic resources."""

    partition: str
    default: bool
    node: str
    state: str
    cpus: int
    memory: int
    gres: Mapping[str, int]

    def has(self, other: "NodeRow") -> bool:
        """Return True if the node has at least the resources of ``other``."""
        enough = self.cpus >= other.cpus and self.memory >= other.memory
        return enough and all(self.gres.get(kind, 0) >= n for kind, n in other.gres.items())


def sinfo_gres_command(partition: str | None = None) -> list[str]:
    """Build the query for the nodes of ``partition`` (or several, by commas), or of all partitions."""
    command = ["sinfo", "--noheader", "--Node", "--format=%P|%N|%T|%c|%m|%G"]
    return [*command, *([f"--partition={partition}"] if partition else [])]


def _resources(gres: str) -> dict[str, int]:
    """Return the number of each resource of a node; a size such as ``disk:800G`` is part of the name."""
    found: dict[str, int] = {}
    for part in filter(None, _BRACKETS.sub("", gres).split(",")):
        name, _, count = part.rpartition(":")
        found |= {name: int(count)} if count.isdecimal() else {part: 1}
    return found


def parse_sinfo_gres(text: str) -> list[NodeRow]:
    """Return a row for each node and partition; lines of another format are ignored."""
    rows = []
    for line in text.splitlines():
        fields = line.strip().split("|")
        if len(fields) != 6 or not (fields[3].isdecimal() and fields[4].isdecimal()):
            continue
        partition, node, state, cpus, memory, gres = fields
        rows.append(
            NodeRow(
                partition.rstrip("*"),
                partition.endswith("*"),
                node,
                state,
                int(cpus),
                int(memory),
                _resources(gres),
            )
        )
    return rows
