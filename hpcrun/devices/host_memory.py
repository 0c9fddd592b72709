"""The memory of a node that this process may use.

A job limited to 32 GB on a node with 500 GB free is killed if it allocates more than its limit. The limit
may be set at any level above the process: Slurm sets limits for the job, the step and the task.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def available_memory(root: Path = Path("/")) -> int:
    """Return the bytes that can be allocated without swapping.

    This is MemAvailable, within the limits of all control groups.

    Args:
        root: folder that contains ``proc`` and ``sys``.
    """
    available = _of_machine(root, "MemAvailable")
    for group, limit, used in _groups(root):
        with contextlib.suppress(OSError, ValueError):  # "max" means that there is no limit
            room = int((group / limit).read_text()) - int((group / used).read_text())
            available = min(available, max(0, room + _reclaimable(group)))
    return available


def total_memory(root: Path = Path("/")) -> int:
    """Return the total memory of this process in bytes: MemTotal, within the limits of all control groups.

    Args:
        root: folder that contains ``proc`` and ``sys``.
    """
    total = _of_machine(root, "MemTotal")
    for group, limit, _ in _groups(root):
        with contextlib.suppress(OSError, ValueError):
            total = min(total, int((group / limit).read_text()))
    return total


def _of_machine(root: Path, key: str) -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) * 1024
    return 1 << 62


def _groups(root: Path) -> Iterator[tuple[Path, str, str]]:
    """Yield the folders of this process's memory groups, innermost first, with the names of limit and use.

    cgroups(7): a line of /proc/self/cgroup is ``number:controllers:path``; version 2 has no controllers.
    """
    lines = ["0::/", "1:memory:/"]  # a container sees its own group as the root
    with contextlib.suppress(OSError):
        lines += (root / "proc/self/cgroup").read_text().splitlines()
    for line in lines:
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if not controllers:
            base, names = root / "sys/fs/cgroup", ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        inner = PurePosixPath(path.lstrip("/"))
        for level in (inner, *inner.parents):
            yield base / level, *names


def _reclaimable(group: Path) -> int:
    """Return the bytes of page cache that the kernel would drop before it kills; they count as used."""
    found = 0
    with contextlib.suppress(OSError, ValueError):
        for line in (group / "memory.stat").read_text().splitlines():
            name, _, value = line.partition(" ")
            if name in (
                "inactive_file",
                "total_inactive_file",
            ):  # version 1 counts the group itself, and the group with its children
                found = max(found, int(value))
    return found
