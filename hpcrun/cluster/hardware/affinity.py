"""Give each rank of a node CPU cores of its own, near its GPU, so that ranks do not fight for them.

Without it the kernel moves threads between sockets, away from the memory they have filled and from
the GPU that they feed. Slurm binds tasks where it is set up so; then there is nothing to do.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

Core = tuple[int, ...]
"""The CPUs (hardware threads) of one core."""

_WORD_BITS = 64


def cpus_of_rank(environ: Mapping[str, str], ranks: int) -> int:
    """How many CPUs one of ``ranks`` ranks on this node may count as its own, at least 1."""
    allowed = len(os.sched_getaffinity(0))
    bound = is_bound(allowed, environ, _parents_cpus())
    return allowed if bound else max(1, min(allowed, _given(environ) or allowed) // ranks)


def bind_rank(environ: Mapping[str, str], local_rank: int, ranks: int, *, gpu: bool) -> int:
    """Bind the calling thread, and all that it will start, to this rank's cores, near its GPU.

    The mask is left as it is where there is one rank, a launcher has bound it already, Slurm lets the
    job run on CPUs that it did not give it, there are fewer cores than ranks, or the kernel refuses.

    Args:
        local_rank: of the ``ranks`` on this node.
        gpu: whether the rank computes on a GPU.

    Returns:
        How many CPUs the rank may count as its own.
    """
    allowed = os.sched_getaffinity(0)
    own = cpus_of_rank(environ, ranks)
    cores = cores_of(allowed)
    if own == len(allowed) or len(cores) < ranks or not_confined(len(allowed), environ):
        return own
    near = gpu_cpus(environ) if gpu else []
    if len(near) == 1:
        # Only its own GPU is shown to it: where the others' are is not known, so that nothing is divided.
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
    """Whether a launcher has given this rank a part of the job's CPUs on the node.

    Args:
        allowed: CPUs that this process may run on.
        parents: CPUs that its parent may run on, where that is known. Slurm's step daemon is not of the
            job, so that there the variable decides.
    """
    job = _given(environ) or parents
    return job is not None and allowed < job


def not_confined(allowed: int, environ: Mapping[str, str]) -> bool:
    """Whether a job of Slurm's may run on more CPUs of the node than it was given.

    Which are its own, nobody says then (TaskPlugin=task/none, slurm.conf(5)): two jobs of one node that
    each bound their ranks would choose the same.
    """
    given = _given(environ)
    return given is not None and given < allowed


def divide(cores: Sequence[Core], near: Sequence[frozenset[int]]) -> list[list[Core]]:
    """Divide ``cores`` among ranks: all of them, each to one, as evenly as it goes.

    Args:
        cores: in the order of their sockets.
        near: for each rank the CPUs near its GPU; empty for no preference.

    Each rank gets its part of the cores near its GPU first, and the rest from what is left.
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
    """The CPUs near a GPU, if they are at least an equal share for one of ``ranks``; else all."""
    local = [core for core in cores if near.issuperset(core)]
    return flat(local if len(local) >= len(cores) // ranks else cores)


def cores_of(allowed: set[int], system: Path = Path("/sys/devices/system/cpu")) -> list[Core]:
    """Group ``allowed`` CPUs by core, ordered by socket: two threads of a core belong to one rank.

    Where the kernel does not tell (containers), each CPU counts as a core.
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
    """The CPUs of ``cores``, ascending."""
    return sorted(cpu for core in cores for cpu in core)


def gpu_cpus(environ: Mapping[str, str]) -> list[frozenset[int]]:
    """For each visible GPU, in CUDA's order, the CPUs near it; nothing where NVML does not tell."""
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
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
