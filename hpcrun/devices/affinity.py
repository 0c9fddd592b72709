"""Bind each rank of a node to separate CPU cores near its GPU, so that ranks do not compete for cores.

Without binding, the kernel moves threads between sockets, away from the memory they have filled and from
the GPU that they feed. If Slurm is configured to bind tasks, nothing is left to do.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

Core = tuple[int, ...]
"""The CPUs (hardware threads) of one core."""

_WORD_BITS = 64


def cpus_of_rank(environ: Mapping[str, str], ranks: int) -> int:
    """Return the number of CPUs that each of ``ranks`` ranks on this node may use, at least 1."""
    allowed = len(os.sched_getaffinity(0))
    bound = is_bound(allowed, environ, len(os.sched_getaffinity(os.getppid())))
    return allowed if bound else max(1, min(allowed, _given(environ) or allowed) // ranks)


def bind_rank(environ: Mapping[str, str], local_rank: int, ranks: int, *, gpu: bool) -> int:
    """Bind the calling thread, and all threads that it starts, to this rank's cores, near its GPU.

    The mask stays unchanged if there is one rank, a launcher has bound it already, Slurm lets the
    job run on CPUs that it did not allocate, there are fewer cores than ranks, or the kernel refuses.

    Args:
        local_rank: index among the ``ranks`` on this node.
        gpu: whether the rank computes on a GPU.

    Returns:
        The number of CPUs that the rank may use.
    """
    allowed = os.sched_getaffinity(0)
    own = cpus_of_rank(environ, ranks)
    cores = cores_of(allowed)
    # The job's own CPUs are unknown if Slurm confines it to none (TaskPlugin=task/none, slurm.conf(5)): two
    # jobs on one node that each bound their ranks would choose the same CPUs.
    confined = len(allowed) <= (_given(environ) or len(allowed))
    if own == len(allowed) or len(cores) < ranks or not confined:
        return own
    near = gpu_cpus(environ) if gpu else []
    if len(near) == 1:
        # The rank sees only its own GPU, so the cores near the other GPUs are unknown and not divided.
        local = [core for core in cores if near[0].issuperset(core)]
        share = local if len(local) >= len(cores) // ranks else cores
    else:
        wanted = [near[rank % len(near)] if near else frozenset() for rank in range(ranks)]
        share = divide(cores, wanted)[local_rank]
    cpus = [cpu for core in share for cpu in core]
    try:
        os.sched_setaffinity(0, cpus)
    except OSError:
        return own
    return min(own, len(cpus))


def is_bound(allowed: int, environ: Mapping[str, str], parents: int) -> bool:
    """Return True if a launcher has bound this rank to a part of the job's CPUs on the node.

    Args:
        allowed: CPUs on which this process may run.
        parents: CPUs on which its parent may run. slurmstepd does not belong to the job, so under Slurm the
            variable decides.
    """
    return allowed < (_given(environ) or parents)


def divide(cores: Sequence[Core], near: Sequence[frozenset[int]]) -> list[list[Core]]:
    """Divide ``cores`` among ranks: each core to one rank, as evenly as possible.

    Args:
        cores: in the order of their sockets.
        near: for each rank the CPUs near its GPU; empty for no preference.

    Each rank first gets its share of the cores near its GPU, then the rest from the remaining cores.
    """
    ranks = len(near)
    quota = [len(cores) // ranks + (rank < len(cores) % ranks) for rank in range(ranks)]
    free = list(cores)
    shares: list[list[Core]] = []
    for rank, wanted in enumerate(near):
        local = [core for core in free if wanted.issuperset(core)] if wanted else []
        sharing = sum(other == wanted for other in near[rank:])
        share = local[: min(quota[rank], len(local) // sharing)]
        free = [core for core in free if core not in share]
        shares.append(share)
    for rank, share in enumerate(shares):
        missing = quota[rank] - len(share)
        share += free[:missing]
        free = free[missing:]
    return shares


def cores_of(allowed: set[int], system: Path = Path("/sys/devices/system/cpu")) -> list[Core]:
    """Group ``allowed`` CPUs by core, ordered by socket: two threads of a core belong to one rank.

    Without that information from the kernel (containers), each CPU counts as a core.
    """
    found: dict[tuple[int, int], list[int]] = {}
    for cpu in sorted(allowed):
        topology = system / f"cpu{cpu}" / "topology"
        try:
            socket = int((topology / "physical_package_id").read_text())
            first = int(
                (topology / "thread_siblings_list").read_text().replace("-", ",").split(",")[0]
            )
        except (OSError, ValueError):
            socket, first = 0, cpu
        found.setdefault((socket, first), []).append(cpu)
    return [tuple(found[key]) for key in sorted(found)]


def gpu_cpus(environ: Mapping[str, str]) -> list[frozenset[int]]:
    """Return the CPUs near each of NVIDIA's GPUs, in the order of CUDA; empty without an answer of NVML."""
    words = (os.cpu_count() or 1) // _WORD_BITS + 1
    try:
        import pynvml

        pynvml.nvmlInit()
        default = ",".join(map(str, range(pynvml.nvmlDeviceGetCount())))
        entries = environ.get("CUDA_VISIBLE_DEVICES", default).replace(" ", "").split(",")
        handles = [
            pynvml.nvmlDeviceGetHandleByIndex(int(entry))
            if entry.isdecimal()
            else pynvml.nvmlDeviceGetHandleByUUID(entry)
            for entry in entries
        ]
        return [_cpus(pynvml.nvmlDeviceGetCpuAffinity(handle, words)) for handle in handles]
    except Exception:  # without the package, pynvml's own error has no name
        return []


def _cpus(mask: Sequence[int]) -> frozenset[int]:
    bits = "".join(f"{word:0{_WORD_BITS}b}"[::-1] for word in mask)
    return frozenset(cpu for cpu, bit in enumerate(bits) if bit == "1")


def _given(environ: Mapping[str, str]) -> int | None:
    on_node = environ.get("SLURM_CPUS_ON_NODE", "")
    return int(on_node) if on_node.isdecimal() else None
