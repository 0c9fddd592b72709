"""Time of communication by NCCL's own cost model, without a network. Imports no torch.

The constants are those with which NCCL 2.30.7 chooses its algorithm (``src/graph/tuning.cc``): latencies of a
start and of a hop, and the share of the bandwidth that an algorithm reaches; its corrections for middle sizes
are missing here. For MI300X the same constants serve, instead of those of RCCL.
"""

import math
from dataclasses import dataclass

GPUS_OF_NODE = 8
# GB/s of a GPU to the other GPUs of its node in one direction, and of all network adapters of a node with
# eight GPUs, from the data sheets of the GPUs and of DGX A100, H100 and B200.
LINKS = {
    "a100-40": (300, 200),
    "a100-80": (300, 200),
    "h100": (450, 400),
    "h200": (450, 400),
    "b200": (900, 400),
    "mi300x": (448, 400),
}
_NVLINK_SHARE = 0.8
"""Part of NVLink's bandwidth that a ring reaches."""

# Microseconds, for the protocols LL, LL128 and Simple.
_START = {"tree": (6.8, 14.0, 8.4), "ring": (6.6, 14.0, 8.4)}
_NVLINK_HOP = {"tree": (0.6, 1.25, 4.0), "ring": (0.6, 1.9, 3.4)}
_NETWORK_HOP = {"tree": (5.0, 8.5, 14.0), "ring": (2.7, 4.0, 14.0)}
# Of an AMD processor; Intel: 1.
_OVERHEAD = (2.0, 2.0, 6.0)
_PROTOCOLS = ("LL", "LL128", "Simple")
# The most GB/s of LL over the network.
_LL_MOST = 87.7
_PLATEAU = 1.4
_PLATEAU_FROM = 64 * 16
"""Bytes per rank from which rings over nodes slow down: 64 for each of 16 channels."""

DETERMINISTIC = [("ring", "Simple")]
"""What train.deterministic=true leaves to NCCL."""
ANY = [(algorithm, protocol) for algorithm in _START for protocol in _PROTOCOLS]


@dataclass(frozen=True)
class Group:
    """The ranks of a collective: their number, and how many of them are on a node."""

    ranks: int
    on_node: int
    gpu: str = "h100"

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return self.ranks // self.on_node

    @property
    def bandwidth(self) -> float:
        """GB/s of the slowest link for each GPU of a ring through the nodes."""
        nvlink, network = LINKS[self.gpu]
        if self.nodes == 1:
            return nvlink * _NVLINK_SHARE
        # Of several such groups on a node, each has its part of the adapters.
        share = network * self.on_node / GPUS_OF_NODE
        return min(nvlink * _NVLINK_SHARE, share) if self.on_node > 1 else share


def seconds(kind: str, size: float, group: Group, allowed: list[tuple[str, str]] = ANY) -> float:
    """Return the time of a collective: all_reduce, all_gather or reduce_scatter of ``size`` bytes.

    ``size`` counts the whole tensor, which each rank has before or after the collective.
    """
    if group.ranks == 1:
        return 0.0
    both = kind == "all_reduce"
    times = []
    for algorithm, protocol in allowed:
        if algorithm == "tree" and not both:
            continue
        number = _PROTOCOLS.index(protocol)
        hops = (2 if both else 1) * (group.ranks - 1)
        over_network = (2 if both else 1) * (group.nodes - 1)
        near, far = _NVLINK_HOP[algorithm][number], _NETWORK_HOP[algorithm][number]
        speed = group.bandwidth
        if algorithm == "ring":
            if group.nodes > 1:
                near = max(near, _OVERHEAD[number])
            latency = (hops - over_network) * near + over_network * far
            speed *= {"LL": 0.5, "LL128": 0.92, "Simple": 1.0}[protocol]
            speed = min(speed, _LL_MOST) if protocol == "LL" else speed
            speed *= group.ranks / hops
            if (
                both
                and protocol == "Simple"
                and group.nodes > 1
                and size / group.ranks >= _PLATEAU_FROM
            ):
                latency *= _PLATEAU
        else:
            latency = 2 * ((group.on_node - 1) * near + int(math.log2(group.nodes)) * far)
            speed *= 0.92 * {"LL": 1 / 3.8, "LL128": 120 / 128, "Simple": 1.0}[protocol] / 2
        times.append((latency + _START[algorithm][number]) * 1e-6 + size / (speed * 1e9))
    return min(times)


def ddp(
    parameters: float, group: Group, bucket_mb: float, allowed: list[tuple[str, str]] = ANY
) -> float:
    """Return the seconds of DDP's all-reduces of gradients in fp32 in a step."""
    size = 4 * parameters
    buckets = max(1, math.ceil(size / (bucket_mb * 2**20)))
    return buckets * seconds("all_reduce", size / buckets, group, allowed)


def fsdp(
    parameters: float,
    layers: int,
    group: Group,
    allowed: list[tuple[str, str]] = ANY,
    *,
    hybrid: bool,
) -> float:
    """Return the seconds of FSDP's collectives in a step.

    Each layer gathers its weights in bf16 twice, and reduces its gradients in fp32 once. ``hybrid``: within a
    node, and the gradients of each shard over the nodes.
    """
    whole = Group(group.on_node, group.on_node, group.gpu) if hybrid else group
    copies = Group(group.nodes if hybrid else 1, 1, group.gpu)
    of_layer = parameters / layers
    return layers * (
        2 * seconds("all_gather", 2 * of_layer, whole, allowed)
        + seconds("reduce_scatter", 4 * of_layer, whole, allowed)
        + seconds("all_reduce", 4 * of_layer / whole.ranks, copies, allowed)
    )


def default_bucket(parameters: float, ranks: int) -> float:
    """Return hpcrun's default of train.bucket_mb in MiB; see ``hpcrun/train/parallel/strategies.py``."""
    return max(25.0, min(25 * ranks / 64, parameters / 2**20))
