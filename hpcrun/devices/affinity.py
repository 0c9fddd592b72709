"""Bind each rank of a node to separate CPU cores, so that ranks do not compete for cores.

Without binding, the kernel moves threads between sockets, away from the memory they have filled. If Slurm is
configured to bind tasks, nothing is left to do.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

Core = tuple[int, ...]
"""The CPUs (hardware threads) of one core."""


def cpus_of_rank(environ: Mapping[str, str], ranks: int) -> int:
    """Return the number of CPUs that each of ``ranks`` ranks on this node may use, at least 1."""
    allowed = len(os.sched_getaffinity(0))
    bound = is_bound(allowed, environ, len(os.sched_getaffinity(os.getppid())))
    return allowed if bound else max(1, min(allowed, _given(environ) or allowed) // ranks)


def bind_rank(environ: Mapping[str, str], local_rank: int, ranks: int) -> int:
    """Bind the calling thread, and all threads that it starts, to this rank's cores.

    The mask stays unchanged if there is one rank, a launcher has bound it already, Slurm lets the
    job run on CPUs that it did not allocate, there are fewer cores than ranks, or the kernel refuses.

    Args:
        local_rank: index among the ``ranks`` on this node. The ranks get the cores in the order of the
            sockets, as nodes with several GPUs have their GPUs in this order too.

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
    cpus = [cpu for core in share(cores, local_rank, ranks) for cpu in core]
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


def share(cores: Sequence[Core], rank: int, ranks: int) -> Sequence[Core]:
    """Return the cores of ``rank``, consecutive ones; the ranks' numbers of cores differ by at most one."""
    size, over = divmod(len(cores), ranks)
    first = rank * size + min(rank, over)
    return cores[first : first + size + (rank < over)]


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


def _given(environ: Mapping[str, str]) -> int | None:
    on_node = environ.get("SLURM_CPUS_ON_NODE", "")
    return int(on_node) if on_node.isdecimal() else None
