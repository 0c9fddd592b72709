"""The facts of this node that need no GPU and no other node: limits, space, names, versions, files."""

import contextlib
import hashlib
import os
import platform
import resource
import socket
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from hpcrun.ranks.network.addresses import addresses_of, is_only_loopback, outward_address
from hpcrun.ranks.network.interfaces import chosen_interfaces, own_interfaces

_RDMA = Path("/sys/class/infiniband")
# Seconds. A client of NFS may hold an old listing of a folder for this long (acdirmin is 30 s by default).
VISIBLE_WITHIN = 40.0
_PAUSE = 0.2


def limits(rdma: Path = _RDMA) -> dict[str, Any]:
    """Return the soft limits of this process (None: unlimited), and whether the node has RDMA devices."""

    def soft(what: int) -> int | None:
        value = resource.getrlimit(what)[0]
        return None if value == resource.RLIM_INFINITY else value

    return {
        "files": soft(resource.RLIMIT_NOFILE),
        "processes": soft(resource.RLIMIT_NPROC),
        "locked": soft(resource.RLIMIT_MEMLOCK),
        "rdma": rdma.is_dir() and any(rdma.iterdir()),
    }


def spaces(run: str | None) -> list[dict[str, Any]]:
    """Return the free bytes and files of /dev/shm, the temporary folder and the run directory."""
    places = [("/dev/shm", "/dev/shm"), ("temporary folder", _temporary_folder())]
    if run is not None:
        places.append(("run directory", run))
    return [{"what": what, "path": path, **_space(path)} for what, path in places]


def _temporary_folder() -> str:
    """Return the folder that programs use for temporary files.

    tempfile.gettempdir() writes into each candidate, and raises an error on a node that can write to none.
    """
    given = (os.environ.get(name) for name in ("TMPDIR", "TEMP", "TMP"))
    return next((folder for folder in given if folder and Path(folder).is_dir()), "/tmp")


def _space(path: str) -> dict[str, Any]:
    try:
        told = os.statvfs(path)
    except OSError as error:
        return {"problem": error.strerror}
    return {
        "free": told.f_bavail * told.f_frsize,
        "size": told.f_blocks * told.f_frsize,
        # Some file systems do not report a number of files.
        "free_files": told.f_favail if told.f_files else None,
    }


def names(hosts: Sequence[str]) -> dict[str, Any]:
    """Return the own host name, whether it leads only to this host, and the hosts that do not resolve."""
    own = socket.gethostname()
    return {
        "own": own,
        "loopback": is_only_loopback(own),
        "unresolved": [host for host in (own, *hosts) if not addresses_of(host)][:8],
    }


def mtu(hosts: Sequence[str], wanted: str | None) -> dict[str, Any]:
    """Return the interface to the other hosts and its MTU; {} without another host.

    Args:
        wanted: ``job.interface``, or NCCL_SOCKET_IFNAME.
    """
    import psutil

    interfaces = own_interfaces()
    found = chosen_interfaces(wanted, interfaces) if wanted else []
    if not found:
        address = outward_address(hosts)
        found = [name for name, own in interfaces.items() if address in own]
    state = psutil.net_if_stats()
    return {"interface": found[0], "mtu": state[found[0]].mtu} if found else {}


def versions() -> dict[str, Any]:
    """Return the versions that can be read without torch."""
    found = {"python": platform.python_version()}
    with contextlib.suppress(metadata.PackageNotFoundError):
        found["hpcrun"] = metadata.version("hpcrun")
    return found


def config_hash(run: str) -> dict[str, Any]:
    """Return the SHA-256 of the run's config as this node reads it."""
    try:
        return {"hash": hashlib.sha256((Path(run) / "config.yaml").read_bytes()).hexdigest()}
    except OSError as error:
        return {"problem": error.strerror}


def write(folder: Path, name: str) -> dict[str, Any]:
    """Write and fsync a file of this node in ``folder``; return the seconds it took."""
    began = time.perf_counter()
    try:
        descriptor = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.write(descriptor, name.encode())
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        return {"problem": error.strerror}
    return {"seconds": round(time.perf_counter() - began, 4)}


def unseen(folder: Path, wanted: Sequence[str], patience: float = VISIBLE_WITHIN) -> list[str]:
    """Return the files ``wanted`` that this node cannot read in ``folder`` within ``patience`` seconds."""
    until = time.monotonic() + patience
    while True:
        left = [name for name in wanted if not _holds(folder / name, name)]
        if not left or time.monotonic() >= until:
            return left
        time.sleep(_PAUSE)


def _holds(path: Path, text: str) -> bool:
    try:
        return path.read_text() == text
    except (OSError, UnicodeDecodeError):
        return False
