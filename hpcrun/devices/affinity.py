"""Bind each rank of a node to separate CPU cores near its GPU, so that ranks do not compete for cores.

Without binding, the kernel moves threads between sockets, away from the memory they have filled and from
the GPU that they feed. If Slurm is configured to bind tasks, nothing is left to do.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcrun.devices import devices as amd

Core = tuple[int, ...]
"""The CPUs (hardware threads) of one core."""

_WORD_BITS = 64


def cpus_of_rank(environ: Mapping[str, str], ranks: int) -> int:
    """Return the number of CPUs that each of ``ranks`` ranks on this node may use, at least 1."""
    allowed = len(os.sched_getaffinity(0))
    bound = is_bound(allowed, environ, _parents_cpus())
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
    if own == len(allowed) or len(cores) < ranks or not_confined(len(allowed), environ):
        return own
    near = gpu_cpus(environ) if gpu else []
    if len(near) == 1:
        # The rank sees only its own GPU, so the cores near the other GPUs are unknown and not divided.
        cpus = nearby(cores, near[0], ranks)
    else:
        wanted = [near[rank % len(near)] if near else frozenset() for rank in range(ranks)]
        cpus = flat(divide(cores, wanted)[local_rank])
    try:
        os.sched_setaffinity(0, cpus)
    except OSError:
        return own
    return min(own, len(cpus))


def is_bound(allowed: int, environ: Mapping[str, str], parents: int | None) -> bool:
    """Return True if a launcher has bound this rank to a part of the job's CPUs on the node.

    Args:
        allowed: CPUs on which this process may run.
        parents: CPUs on which its parent may run, if known. slurmstepd does not belong to the
            job, so under Slurm the variable decides.
    """
    job = _given(environ) or parents
    return job is not None and allowed < job


def not_confined(allowed: int, environ: Mapping[str, str]) -> bool:
    """Return True if a Slurm job may run on more CPUs of the node than it was allocated.

    Then its own CPUs are unknown (TaskPlugin=task/none, slurm.conf(5)): two jobs on one node that
    each bound their ranks would choose the same CPUs.
    """
    given = _given(environ)
    return given is not None and given < allowed


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


def nearby(cores: Sequence[Core], near: frozenset[int], ranks: int) -> list[int]:
    """Return the CPUs near a GPU, if they are at least an equal share for one of ``ranks``; else all."""
    local = [core for core in cores if near.issuperset(core)]
    return flat(local if len(local) >= len(cores) // ranks else cores)


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


def flat(cores: Sequence[Core]) -> list[int]:
    """Return the CPUs of ``cores``, ascending."""
    return sorted(cpu for core in cores for cpu in core)


def gpu_cpus(environ: Mapping[str, str]) -> list[frozenset[int]]:
    """Return the CPUs near each visible GPU, in the order of CUDA or HIP; empty without an answer."""
    try:
        import pynvml
    except ImportError:
        return amd.near_cpus(amd.gpu_addresses(environ))
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return amd.near_cpus(amd.gpu_addresses(environ))
    words = (os.cpu_count() or 1) // _WORD_BITS + 1
    try:
        return [
            _cpus(pynvml.nvmlDeviceGetCpuAffinity(handle, words))
            for handle in _handles(pynvml, environ.get("CUDA_VISIBLE_DEVICES"))
        ]
    except pynvml.NVMLError:
        return []
    finally:
        pynvml.nvmlShutdown()


def _handles(nvml: Any, listed: str | None) -> Iterator[Any]:
    if listed is None:
        listed = ",".join(map(str, range(nvml.nvmlDeviceGetCount())))
    for entry in (part.strip() for part in listed.split(",")):
        if entry.isdecimal():
            yield nvml.nvmlDeviceGetHandleByIndex(int(entry))
        else:
            yield nvml.nvmlDeviceGetHandleByUUID(entry)


def _cpus(mask: Sequence[int]) -> frozenset[int]:
    return frozenset(
        word * _WORD_BITS + bit
        for word, bits in enumerate(mask)
        for bit in range(_WORD_BITS)
        if bits >> bit & 1
    )


def _given(environ: Mapping[str, str]) -> int | None:
    on_node = environ.get("SLURM_CPUS_ON_NODE", "")
    return int(on_node) if on_node.isdecimal() else None


def _parents_cpus() -> int | None:
    try:
        return len(os.sched_getaffinity(os.getppid()))
    except OSError:
        return None
