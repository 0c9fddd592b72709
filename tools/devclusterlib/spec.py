"""The user's request: one frozen record, checked once, stored with the cluster."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field

from .errors import Refusal

SHARED_FILE_SYSTEMS = ("local", "gluster")
MAX_NODES = 200


@dataclass(frozen=True)
class Partition:
    """One partition: its name and Slurm's own ``Key=Value`` settings for it."""

    name: str
    options: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        """Return the form that `parse_partition` reads."""
        settings = ",".join(f"{key}={value}" for key, value in self.options)
        return f"{self.name}:{settings}" if settings else self.name


@dataclass(frozen=True)
class ClusterSpec:
    """All settings of a cluster; two equal specs build equal clusters."""

    name: str = "dev"
    nodes: int = 4
    gpus: tuple[int, ...] = (4,)
    gpu_types: tuple[str, ...] = ()
    """Types of all nodes' GPUs, or of each node's; GPUs without a type where it is empty."""
    cpus: int = 16
    memory_mb: int = 64000
    user: str = "hpcuser"
    shared_fs: str = "local"
    accounting: bool = False
    realistic: bool = False
    grace_s: int = 0
    preempt_user_signal: bool = False
    partitions: tuple[Partition, ...] = ()
    settings: tuple[tuple[str, str], ...] = field(default=())
    slurm: str = ""
    """Version of Slurm, as `24.11`; the system's own where it is empty."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,30}", self.name):
            raise Refusal(
                f"cluster name {self.name!r} is not usable",
                "take lower-case letters, digits and dashes, 31 at most",
            )
        if self.slurm:
            check_version(self.slurm)
        if len(self.gpu_types) not in (0, 1, self.nodes):
            raise Refusal(
                f"--gpu-types names {len(self.gpu_types)} nodes, the cluster has {self.nodes}",
                "give one type for all nodes, or one for each",
            )
        for kind in self.gpu_types:
            if not re.fullmatch(r"[a-z][a-z0-9_.-]{0,30}", kind):
                raise Refusal(f"--gpu-types: {kind!r} is no type", "write one such as a100")
        if not 1 <= self.nodes <= MAX_NODES:
            raise Refusal(f"--nodes {self.nodes}", f"take a number from 1 to {MAX_NODES}")
        if len(self.gpus) not in (1, self.nodes):
            raise Refusal(
                f"--gpus names {len(self.gpus)} nodes, the cluster has {self.nodes}",
                "give one number for all nodes, or one for each",
            )
        if any(count < 0 or count > 64 for count in self.gpus):
            raise Refusal("--gpus is out of range", "take 0 to 64 GPUs a node")
        if self.cpus < 1 or self.memory_mb < 1 or self.grace_s < 0:
            raise Refusal("--cpus, --memory and --grace count things", "give positive numbers")
        if self.shared_fs not in SHARED_FILE_SYSTEMS:
            raise Refusal(
                f"--shared-fs {self.shared_fs} is unknown", f"take {'|'.join(SHARED_FILE_SYSTEMS)}"
            )
        if not re.fullmatch(r"[a-z_][a-z0-9_-]{0,30}", self.user) or self.user == "root":
            raise Refusal(
                f"--user {self.user!r} cannot own jobs", "give the name of an ordinary user"
            )

    @property
    def node_names(self) -> list[str]:
        """Return the compute nodes in Slurm's order."""
        return [f"node{number}" for number in range(1, self.nodes + 1)]

    @property
    def host_names(self) -> list[str]:
        """Return every host: the controller's, the login host, the compute nodes."""
        return ["ctl", "login", *self.node_names]

    def gpus_of(self, node: str) -> int:
        """Return the number of simulated GPUs of ``node``."""
        if len(self.gpus) == 1:
            return self.gpus[0]
        return self.gpus[self.node_names.index(node)]

    def gpu_type_of(self, node: str) -> str:
        """Return the type of the GPUs of ``node``, empty for GPUs without a type."""
        if len(self.gpu_types) < 2:
            return "".join(self.gpu_types)
        return self.gpu_types[self.node_names.index(node)]

    def to_json(self) -> str:
        """Return text that `from_json` reads back to an equal spec."""
        return json.dumps(asdict(self), indent=1)

    @staticmethod
    def from_json(text: str) -> ClusterSpec:
        """Return the spec of a text of `to_json`."""
        raw = json.loads(text)
        raw["gpus"] = tuple(raw["gpus"])
        raw["gpu_types"] = tuple(raw["gpu_types"])
        raw["settings"] = tuple((key, value) for key, value in raw["settings"])
        raw["partitions"] = tuple(
            Partition(item["name"], tuple((key, value) for key, value in item["options"]))
            for item in raw["partitions"]
        )
        return ClusterSpec(**raw)

    def difference(self, other: ClusterSpec) -> list[str]:
        """Return the names of the fields that differ, with both values, for a message."""
        mine, theirs = asdict(self), asdict(other)
        return [f"{key} {mine[key]} -> {theirs[key]}" for key in mine if mine[key] != theirs[key]]


def check_version(text: str) -> None:
    """Refuse a version without Slurm's form, such as `24.11`."""
    if not re.fullmatch(r"\d\d\.\d\d", text):
        raise Refusal(f"--slurm {text!r} is not a version of Slurm", "write it like 24.11")


def parse_gpus(text: str) -> tuple[int, ...]:
    """Return the GPUs of all nodes (``4``) or of each node (``4,4,2``)."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise Refusal(
            f"--gpus {text!r} is not a number", "write --gpus 4 or --gpus 4,4,2"
        ) from None


def parse_setting(text: str) -> tuple[str, str]:
    """Return name and value of a ``Key=Value`` line of slurm.conf."""
    key, separator, value = text.partition("=")
    if not separator or not re.fullmatch(r"[A-Za-z]+", key):
        raise Refusal(f"{text!r} is not a Slurm setting", "write Key=Value, as in slurm.conf")
    return key, value


def parse_partition(text: str) -> Partition:
    """Return the partition of ``NAME`` or ``NAME:Key=Value,Key=Value``, with Slurm's keys."""
    name, _, options = text.partition(":")
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", name):
        raise Refusal(
            f"partition {text!r} has no usable name", "write NAME or NAME:Key=Value,Key=Value"
        )
    return Partition(name, tuple(parse_setting(part) for part in options.split(",") if part))
