"""The probes of a node without its GPUs: space, limits, names, versions, config, interface."""

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

from hpcrun.network.probes import Answer, Needs, Records, Same, Status, probe
from hpcrun.ranks.addresses import addresses_of, is_only_loopback, outward_address
from hpcrun.ranks.interfaces import chosen_interfaces, own_interfaces

_GIB, _MIB = 1 << 30, 1 << 20
# Docker's default for /dev/shm is 64 MiB, in which one DataLoader worker fails with SIGBUS.
_LEAST, _LITTLE = 64 * _MIB, 1 * _GIB
_FEW_FILES = 4096
_RDMA = Path("/sys/class/infiniband")
_ONE_ENVIRONMENT = (
    "use one environment on all nodes (job.python, job.container), or exclude the node"
)


@probe("space")
def space(needs: Needs) -> Records:
    """Check the free bytes and files of /dev/shm, the temporary folder and the run directory."""
    places = [("/dev/shm", "/dev/shm"), ("temporary folder", _temporary_folder())]
    for what, path in [*places, *([("run directory", needs.run)] if needs.run else [])]:
        name = what if what == path else f"{what} {path}"
        remedy = "delete files of other jobs there, or exclude the node"
        if what == "/dev/shm":
            remedy = "mount a larger one (containers: --shm-size), or use data.workers=0"
        try:
            seen = os.statvfs(path)
        except OSError as error:
            yield Answer("warn", f"{name}: {error.strerror}", remedy)
            continue
        # Some file systems do not report a number of files.
        files = seen.f_favail if seen.f_files else None
        yield room(name, seen.f_bavail * seen.f_frsize, files, remedy)


def room(name: str, free: int, files: int | None, remedy: str) -> Answer:
    """Return the statement about a place with ``free`` bytes and free ``files`` (None: unknown)."""
    if files == 0:
        return Answer("fail", f"{name}: no free inodes", remedy)
    if free < _LITTLE:
        status: Status = "fail" if free < _LEAST else "warn"
        return Answer(status, f"{name}: {free / _MIB:.0f} MiB free", remedy)
    return Answer("pass", f"{name}: {free / _GIB:.0f} GiB free")


def _temporary_folder() -> str:
    """Return the folder that programs use for temporary files.

    tempfile.gettempdir() writes into each candidate, and raises an error on a node that can write to none.
    """
    given = (os.environ.get(name) for name in ("TMPDIR", "TEMP", "TMP"))
    return next((folder for folder in given if folder and Path(folder).is_dir()), "/tmp")


@probe("limits")
def limits(_needs: Needs) -> Records:
    """Check the soft limits of this process, which the ranks have too."""
    bad = False
    for what, kind in (
        ("open files (ulimit -n)", resource.RLIMIT_NOFILE),
        ("processes (ulimit -u)", resource.RLIMIT_NPROC),
    ):
        value = resource.getrlimit(kind)[0]
        if value != resource.RLIM_INFINITY and value < _FEW_FILES:
            bad = True
            remedy = f"raise the limit to {_FEW_FILES} or more in job.setup"
            yield Answer("warn", f"{value} {what}", remedy)
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if locked != resource.RLIM_INFINITY and _RDMA.is_dir() and any(_RDMA.iterdir()):
        bad = True
        words = f"{locked // 1024} KiB of locked memory (ulimit -l), with RDMA devices"
        yield Answer("warn", words, "the administrator sets LimitMEMLOCK=infinity for slurmd")
    if not bad:
        yield Answer("pass", "enough")


@probe("host names")
def host_names(needs: Needs) -> Records:
    """Check that this node resolves the names of all nodes, and its own not only to loopback."""
    own = socket.gethostname()
    unresolved = [host for host in (own, *needs.hosts) if not addresses_of(host)][:8]
    if unresolved:
        remedy = "add the names to DNS or /etc/hosts, or set job.interface"
        yield Answer("warn", f"cannot resolve {', '.join(unresolved)}", remedy)
    elif needs.hosts and is_only_loopback(own):
        remedy = "a program that binds to the host name needs GLOO_SOCKET_IFNAME"
        yield Answer("warn", f"{own} resolves only to loopback", remedy)
    else:
        yield Answer("pass", "resolve")


@probe("versions")
def versions(_needs: Needs) -> Records:
    """Report the versions that can be read without torch."""
    yield Same("python", platform.python_version(), _ONE_ENVIRONMENT)
    with contextlib.suppress(metadata.PackageNotFoundError):
        yield Same("hpcrun", metadata.version("hpcrun"), _ONE_ENVIRONMENT)


def library_versions(found: dict[str, str | None]) -> Records:
    """Report the versions of torch and of its libraries."""
    for name, version in found.items():
        if version is not None:
            yield Same(name, str(version), _ONE_ENVIRONMENT, check="versions")


@probe("config")
def config(needs: Needs) -> Records:
    """Report the SHA-256 of the run's config as this node reads it."""
    if needs.run is None:
        return
    try:
        text = (Path(needs.run) / "config.yaml").read_bytes()
    except OSError as error:
        remedy = "check the mount of the run directory on this node"
        yield Answer("fail", f"cannot be read: {error.strerror}", remedy)
        return
    remedy = "put the run on a file system that all nodes share"
    yield Same("hash", hashlib.sha256(text).hexdigest()[:12], remedy)


@probe("mtu", netcheck=True)
def mtu(needs: Needs) -> Records:
    """Report the MTU of the interface to the other nodes."""
    import psutil

    interfaces = own_interfaces()
    wanted = needs.interface or os.environ.get("NCCL_SOCKET_IFNAME")
    found = chosen_interfaces(wanted, interfaces) if wanted else []
    if not found:
        address = outward_address(needs.hosts)
        found = [name for name, own in interfaces.items() if address in own]
    if found:
        remedy = "large packets are lost between the nodes: the administrator sets one MTU on all"
        yield Same("MTU", str(psutil.net_if_stats()[found[0]].mtu), remedy, "warn")


# The checks of the run directory are orders of their own: every node writes before the first node reads.
RUN_DIRECTORY = "run directory"
SLOW_WRITE = 2.0
# Seconds. A client of NFS may hold an old listing of a folder for this long (acdirmin is 30 s by default).
_VISIBLE_WITHIN = 40.0
_PAUSE = 0.2


def write(folder: str, name: str) -> dict[str, Any]:
    """Write and fsync a file of this node in ``folder``; return the seconds it took, or the problem."""
    began = time.perf_counter()
    try:
        descriptor = os.open(Path(folder) / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.write(descriptor, name.encode())
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        return {"problem": error.strerror}
    return {"seconds": round(time.perf_counter() - began, 4)}


def read(folder: str, names: Sequence[str]) -> list[str]:
    """Return up to 8 of the files ``names`` in ``folder`` that this node cannot read within 40 seconds."""
    until = time.monotonic() + _VISIBLE_WITHIN
    while True:
        left = [name for name in names if not _holds(Path(folder) / name, name)]
        if not left or time.monotonic() >= until:
            return left[:8]
        time.sleep(_PAUSE)


def _holds(path: Path, text: str) -> bool:
    try:
        return path.read_text() == text
    except (OSError, UnicodeDecodeError):
        return False
