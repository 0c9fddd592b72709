"""Raise the limit of open files for rank 0, to which every other rank connects."""

import resource

_A_RANK = 2
"""Connections per rank to rank 0's key-value store: torch's, and the watchdog's."""

_BESIDE = 512
"""File descriptors for everything else: data, logs, the training's own connections."""


def make_room(world_size: int) -> str | None:
    """Raise this process's limit of open files to what rank 0 needs, as far as the hard limit allows.

    Slurm gives a job the limit of the shell that submitted it, often 1,024. Ranks beyond it could not
    connect.

    Returns:
        A line for the user if even the hard limit is too low, else None.
    """
    wanted = _A_RANK * world_size + _BESIDE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return None
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed == wanted:
        return None
    return (
        f"rank 0 may open {allowed} files but needs about {wanted} for {world_size} ranks; ask the site to "
        "raise the hard limit (ulimit -Hn) on the nodes"
    )
