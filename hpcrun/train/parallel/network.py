"""Time of communication by NCCL's own cost model, without a network. Imports no torch.

The constants and formulas are those with which NCCL 2.30.7 chooses its algorithm (``src/graph/tuning.cc``):
latencies of a start and of a hop, and the bandwidth that an algorithm reaches. Sums in switches (NVLS) and
PAT are not included. For MI300X the constants of H100 serve, instead of those of RCCL.
"""

import math
from dataclasses import dataclass

from hpcrun.config import Config

GPUS_OF_NODE = 8


@dataclass(frozen=True)
class Machine:
    """A node with eight GPUs.

    ``nvlink``: GB/s of a GPU to the other GPUs in one direction. ``network``: GB/s of all adapters. ``ll``:
    the most GB/s of the protocol LL inside the node. Data sheets: the GPUs, and DGX A100, H100, H200, B200.
    """

    nvlink: float
    network: float
    intel: bool
    ll: float


MACHINES = {
    "a100-40": Machine(300, 200, intel=False, ll=87.7),
    "a100-80": Machine(300, 200, intel=False, ll=87.7),
    "h100": Machine(450, 400, intel=True, ll=141.0),
    "h200": Machine(450, 400, intel=True, ll=141.0),
    "b200": Machine(900, 400, intel=True, ll=282.0),
    "mi300x": Machine(448, 400, intel=False, ll=141.0),
}
_NVLINK_SHARE = 0.8
"""Part of NVLink's bandwidth that a ring reaches."""

# Microseconds, for the protocols LL, LL128 and Simple.
_START = {"tree": (6.8, 14.0, 8.4), "ring": (6.6, 14.0, 8.4)}
_NVLINK_HOP = {"tree": (0.6, 1.25, 4.0), "ring": (0.6, 1.9, 3.4)}
_NETWORK_HOP = {"tree": (5.0, 8.5, 14.0), "ring": (2.7, 4.0, 14.0)}
# The least of a hop in a ring over nodes: an Intel processor posts a message in 1 microsecond, AMD in 2.
_OVERHEAD = {True: (1.0, 1.0, 3.0), False: (2.0, 2.0, 6.0)}
_PROTOCOLS = ("LL", "LL128", "Simple")
# The most GB/s of LL over two nodes, and over more.
_LL_OVER_NODES = {True: (39.0, 20.4), False: (22.5, 19.0)}
# Parts of the bandwidth of a tree, for sizes from 64 bytes in powers of two.
_TREE_PARTS = (
    (1, 1, 1, 1, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1, 1, 1),
    (1, 1, 1, 1, 1, 0.9, 0.8, 0.8, 0.8, 0.7, *[0.6] * 6, 0.8, *[0.9] * 4, 1, 1),
    (*[0.9] * 7, 0.8, 0.7, 0.6, 0.6, *[0.5] * 4, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9, 0.9),
)  # fmt: skip
_PLATEAU = 1.4
_PLATEAU_FROM = 64 * 16
"""Bytes per rank from which rings over nodes slow down: 64 for each of 16 channels."""

DETERMINISTIC = [("ring", "Simple")]
"""What train.deterministic=true leaves to NCCL."""
ANY = [(algorithm, protocol) for algorithm in _START for protocol in _PROTOCOLS]

_BUCKETS = 4
"""Fewest buckets of DDP, so that communication overlaps with the backward pass."""

BYTES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2}
MANY_GRADIENTS = 2 * 10**9
"""Bytes of unsharded gradients from which FSDP reduces gradients in every micro-batch by default.

Not a part of the device's memory: another kind of GPU after a requeue would change the order of sums.
"""


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
        machine = MACHINES[self.gpu]
        near = machine.nvlink * _NVLINK_SHARE
        # Of several such groups on a node, each has its part of the adapters.
        far = machine.network * self.on_node / GPUS_OF_NODE
        return near if self.nodes == 1 else far if self.on_node == 1 else min(near, far)


def seconds(kind: str, size: float, group: Group, allowed: list[tuple[str, str]] = ANY) -> float:
    """Return the time of a collective: all_reduce, all_gather or reduce_scatter of ``size`` bytes.

    ``size`` counts the whole tensor, which each rank has before or after the collective.
    """
    if group.ranks == 1:
        return 0.0
    both = kind == "all_reduce"
    times = [
        _seconds(algorithm, protocol, size, group, both=both)
        for algorithm, protocol in allowed
        if both or algorithm == "ring"
    ]
    return min(times)


def _seconds(algorithm: str, protocol: str, size: float, group: Group, *, both: bool) -> float:
    """Return the time of an all-reduce (``both``), or of half of it, with a given algorithm."""
    number, nodes = _PROTOCOLS.index(protocol), group.nodes
    machine, speed = MACHINES[group.gpu], group.bandwidth
    near, latency = _NVLINK_HOP[algorithm][number], _START[algorithm][number]
    # With one rank per node nothing hides the latency of the network.
    far = _NETWORK_HOP["tree" if group.on_node == 1 else algorithm][number]
    most = machine.ll if nodes == 1 else _LL_OVER_NODES[machine.intel][nodes > 2]
    if algorithm == "ring":
        hops, over_network = ((2 if both else 1) * count for count in (group.ranks - 1, nodes - 1))
        near = max(near, _OVERHEAD[machine.intel][number]) if nodes > 1 else near
        latency += (hops - over_network) * near + over_network * far
        speed *= {"LL": 0.5, "LL128": 0.92, "Simple": 1.0}[protocol]
        speed = (min(speed, most) if protocol == "LL" else speed) * group.ranks / hops
        if both and protocol == "Simple" and nodes > 1 and size / group.ranks >= _PLATEAU_FROM:
            latency *= _PLATEAU
    else:
        latency += 2 * ((group.on_node - 1) * near + int(math.log2(nodes)) * far)
        ll128 = 7 / 9 if nodes == 1 else 120 / 128
        speed *= 0.92 * {"LL": 1 / 3.8, "LL128": ll128, "Simple": 1.0}[protocol]
        speed = (min(speed, most) if protocol == "LL" else speed) / 2
        place = int(math.log2(max(1.0, size / 64)))
        speed *= _TREE_PARTS[number][place] if place < len(_TREE_PARTS[number]) else 1
    return latency * 1e-6 + size / (speed * 1e9)


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
    weight: int = 2,
    gradient: int = 4,
) -> tuple[float, float]:
    """Return the seconds in which FSDP gathers all weights once, and reduces all gradients once.

    ``weight`` and ``gradient``: in bytes. With ``hybrid`` both are within a node; then the gradients of each
    shard are reduced over the nodes.
    """
    whole = Group(group.on_node, group.on_node, group.gpu) if hybrid else group
    copies = Group(group.nodes if hybrid else 1, 1, group.gpu)
    of_layer = parameters / layers
    reduced = seconds("reduce_scatter", gradient * of_layer, whole, allowed)
    reduced += seconds("all_reduce", gradient * of_layer / whole.ranks, copies, allowed)
    return layers * seconds("all_gather", weight * of_layer, whole, allowed), layers * reduced


def fsdp_passes(
    config: Config, parameters: int, layers: int, group: Group, *, hybrid: bool
) -> tuple[float, float]:
    """Return :func:`fsdp` with the precisions and the algorithms of ``config``."""
    weights = config.fsdp.param_dtype or config.amp.dtype
    sizes = {"weight": BYTES[weights], "gradient": BYTES[config.fsdp.reduce_dtype or weights]}
    return fsdp(parameters, layers, group, allowed(config), hybrid=hybrid, **sizes)


def fsdp_step(
    config: Config, parameters: int, layers: int, group: Group, accumulation: int, *, hybrid: bool
) -> float:
    """Return the seconds of FSDP's collectives in a step of ``accumulation`` micro-batches."""
    options = config.fsdp
    gathered, reduced = fsdp_passes(config, parameters, layers, group, hybrid=hybrid)
    each = options.reduce_each_micro_batch
    if each == "auto":
        dtype = options.reduce_dtype or options.param_dtype or config.amp.dtype
        each = BYTES[dtype] * parameters >= MANY_GRADIENTS
    gathers = 2 * accumulation if options.reshard_after_forward else 1
    return gathers * gathered + (accumulation if each else 1) * reduced


def machine_named(device: str) -> str:
    """Return the key of `MACHINES` for a name such as NVIDIA A100-SXM4-80GB; h100 for an unknown device."""
    return next((key for key in MACHINES if key.partition("-")[0] in device.lower()), "h100")


def allowed(config: Config) -> list[tuple[str, str]]:
    """Return the algorithms and protocols that ``train.deterministic`` leaves to NCCL."""
    return DETERMINISTIC if config.train.deterministic in (True, "strict") else ANY


def default_bucket(gradients: float, ranks: int) -> float | None:
    """Return the MiB per all-reduce of DDP for bytes of ``gradients``; None: torch's, 25 after a first of 1.

    Each bucket pays for the latency of an all-reduce, and the last one overlaps with nothing: the number of
    buckets, at least four, has the least time for all of them and the last again. It is the time of DGX H100
    with `DETERMINISTIC` for all machines, so that a requeue to other nodes does not change the order of sums.
    """
    most = int(gradients / (25 * 2**20))
    if most <= _BUCKETS or ranks == 1:
        return None
    on_node = min(ranks, GPUS_OF_NODE)
    group = Group(math.ceil(ranks / on_node) * on_node, on_node)

    def time(count: int) -> float:
        return (count + 1) * seconds("all_reduce", gradients / count, group, DETERMINISTIC)

    return float(math.ceil(gradients / min(range(_BUCKETS, most), key=time) / 2**20))
