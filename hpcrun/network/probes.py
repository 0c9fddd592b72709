"""The probes of `hpcrun preflight` and `hpcrun netcheck`: their records, their list, and their findings.

A probe is a function that runs on every node and yields what it found there. The probes of the node are
below, those of its GPUs in `gpu_probes`.
"""

import contextlib
import importlib
import os
import platform
import resource
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from hpcrun.errors import UserError
from hpcrun.ports.entry_points import NODE_CHECKS
from hpcrun.ports.node_checks import Answer, Needs, NodeCheck, Record, Records, Same, Status, Timed
from hpcrun.ranks.addresses import addresses_of, is_only_loopback, outward_address
from hpcrun.ranks.interfaces import chosen_interfaces, own_interfaces

SLOWER = 1.25
"""A time above this multiple of the best time is slow: the first products of a job vary by more than 10 %."""


Found = Mapping[str, Sequence[tuple[str, Record]]]
"""For each node, what its probes yielded, with the name of each probe."""


@dataclass(frozen=True)
class Probe:
    """A check of every node. ``function``: runs there. ``seconds``: its limit.

    ``hardware``: a failure concerns the node even if the job has no other node to compare.
    ``netcheck``: `hpcrun netcheck` runs the probe too.
    """

    name: str
    function: Callable[[Needs], Records]
    seconds: float = 120.0
    hardware: bool = False
    netcheck: bool = False


_PROBES: dict[str, Probe] = {}


def probes() -> Mapping[str, Probe]:
    """Return all probes by name; the module of the GPUs adds its own to the list."""
    importlib.import_module("hpcrun.network.gpu_probes")
    return _PROBES


def probe(name: str, **options: Any) -> Callable[[Callable[[Needs], Records]], Any]:
    """Add a function to the probes, with the ``options`` of :class:`Probe`."""

    def add(function: Callable[[Needs], Records]) -> Callable[[Needs], Records]:
        _PROBES[name] = Probe(name, function, **options)
        return function

    return add


def added_probe(name: str) -> Probe:
    """Return the check ``name`` of another package.

    Raises:
        UserError: there is no such check, or its package does not work.
    """
    if name in probes():
        raise UserError(f"{name}: is a check of hpcrun, and runs without its name; remove the name")
    found = NODE_CHECKS.load(name)
    check = found if isinstance(found, NodeCheck) else NodeCheck(found)
    if not callable(check.function):
        package = NODE_CHECKS.find(name).package
        raise UserError(
            f"{name}: the check of the package {package} is no function; repair the package"
        )
    return Probe(name, check.function, check.seconds, check.hardware)


def record_from(data: Mapping[str, Any]) -> Record:
    """Return the record from the result of ``asdict``."""
    kind = Timed if "seconds" in data else Same if "value" in data else Answer
    return kind(**data)


@dataclass(frozen=True)
class Finding:
    """A result: about one node, the two ends of a link, or about all nodes if ``nodes`` is empty."""

    check: str
    nodes: tuple[str, ...]
    status: Status
    words: str
    remedy: str = ""

    @property
    def text(self) -> str:
        """The fault and the remedy in one line."""
        return f"{self.words}; {self.remedy}" if self.remedy else self.words

    def as_record(self) -> dict[str, Any]:
        """Return the finding as one flat JSON object."""
        return asdict(self) | {"nodes": list(self.nodes)}


def findings_of(found: Found) -> list[Finding]:
    """Return the findings of all nodes: their statements, and the values that differ."""
    listed = [(node, check, one) for node, reported in found.items() for check, one in reported]
    return [*_statements(listed, len(found)), *_differences(listed), *_slow_devices(listed)]


Listed = Sequence[tuple[str, str, Record]]


def _statements(listed: Listed, count: int) -> Iterable[Finding]:
    reported = [(node, check, one) for node, check, one in listed if isinstance(one, Answer)]
    for node, check, one in reported:
        nodes = {name for name, of, other in reported if (of, other.status) == (check, one.status)}
        everywhere = one.everywhere is not None and len(nodes) == count
        status = one.everywhere if everywhere and one.everywhere else one.status
        yield Finding(check, (node,), status, one.words, one.remedy)


def _differences(listed: Listed) -> Iterable[Finding]:
    """Yield a finding for each value that differs from most, or a single one without a majority."""
    groups: dict[tuple[str, str], list[tuple[str, Same]]] = {}
    for node, check, one in listed:
        if isinstance(one, Same):
            groups.setdefault((one.check or check, one.what), []).append((node, one))
    nodes = {node for node, _, _ in listed}
    equal: dict[str, list[str]] = {}
    for (check, what), seen in groups.items():
        usual, count = Counter(one.value for _, one in seen).most_common(1)[0]
        status, remedy = seen[0][1].status, seen[0][1].remedy
        if count == len(seen):
            on_all = {node for node, _ in seen} == nodes
            equal.setdefault(check, []).extend([f"{what} {usual}"] if on_all else [])
        elif count * 2 <= len(seen):
            values = ", ".join(f"{node} has {one.value}" for node, one in seen[:4])
            yield Finding(check, (), status, f"{what} differs: {values}", remedy)
        else:
            for node, one in seen:
                if one.value != usual:
                    of = f"{one.of}: " if one.of else ""
                    words = f"{of}{what} is {one.value}, on most nodes {usual}"
                    yield Finding(check, (node,), status, words, remedy)
    for check, values_of in equal.items():
        if values_of:
            yield Finding(check, (), "pass", f"equal: {', '.join(values_of)}")


def _slow_devices(listed: Listed) -> Iterable[Finding]:
    times = [(node, check, one) for node, check, one in listed if isinstance(one, Timed)]
    best: dict[str, float] = {}
    for _, _, one in times:
        best[one.kind] = min(one.seconds, best.get(one.kind, one.seconds))
    for node, check, one in times:
        share = one.seconds / best[one.kind]
        if share > SLOWER:
            words = f"{one.of} takes {share:.2f} times as long as the best {one.kind}"
            yield Finding(check, (node,), "warn", words, one.remedy)


_ORDER: Sequence[Status] = ("fail", "warn", "unknown", "pass")


def lines(found: Sequence[Finding]) -> list[str]:
    """Return the report: a line for each check that passes everywhere, and for each other finding."""
    checks = list(dict.fromkeys(one.check for one in found))
    width = max(map(len, checks), default=0)
    text: list[str] = []
    for check in checks:
        of_check = [one for one in found if one.check == check]
        bad = [one for one in of_check if one.status != "pass"]
        for one in sorted(bad, key=lambda one: _ORDER.index(one.status)):
            where = " - ".join(one.nodes) or "all nodes"
            text.append(f"{one.status:<7}  {check:<{width}}  {where}: {one.text}")
        if not bad:
            # The numbers of other nodes differ slightly: the first node is the example.
            first = [one for one in of_check if one.nodes in (of_check[0].nodes, ())]
            shown = dict.fromkeys(one.words for one in first)
            text += [f"{'pass':<7}  {check:<{width}}  {words}" for words in shown]
    return text


_GIB, _MIB = 1 << 30, 1 << 20
# Docker's default for /dev/shm is 64 MiB, in which one DataLoader worker fails with SIGBUS.
_LEAST, _LITTLE = 64 * _MIB, 1 * _GIB
_FEW_FILES = 4096
_RDMA = Path("/sys/class/infiniband")
_ONE_ENVIRONMENT = "use one environment on all nodes (job.python, job.image), or exclude the node"


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
