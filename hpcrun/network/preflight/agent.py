"""The part of a preflight on every node, one task per node: ``python -m hpcrun.network.preflight.agent``.

Orders are JSON lines on standard input, answers are JSON lines on standard output, as for `hpcrun netcheck`.
Each answer is short, because srun mixes long lines of different tasks.
"""

import contextlib
import hashlib
import json
import os
import platform
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from hpcrun.devices.devices import visible_gpus
from hpcrun.network.preflight.gpus import read_gpus, read_xids
from hpcrun.ranks.addresses import addresses_of, is_only_loopback, outward_address
from hpcrun.ranks.interfaces import chosen_interfaces, own_interfaces

_GEMM = (sys.executable, "-m", "hpcrun.network.preflight.gemm")


class PreflightAgent:
    """A node: answers each order with facts, and ends each answer with ``done``."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._gemm: Child | None = None

    def say(self, **words: Any) -> None:
        """Print one answer."""
        print(json.dumps({"node": self._name, **words}), flush=True)

    def fact(self, section: str, value: Any) -> None:
        """Print the facts of one section."""
        self.say(type="fact", section=section, value=value)

    def obey(self, order: Mapping[str, Any]) -> bool:
        """Carry out one order; return False for the last order."""
        kind = order["type"]
        if kind == "end":
            return False
        if kind == "clock":
            self.say(type="clock", number=order["number"], time=time.time())
            return True
        obeyed = {"look": self._look, "write": self._write, "read": self._read, "gemm": self._wait}
        obeyed[kind](order)
        self.say(type="done", of=kind)
        return True

    def close(self) -> None:
        """End the child."""
        if self._gemm is not None:
            self._gemm.kill()

    def _look(self, order: Mapping[str, Any]) -> None:
        gpus = order["gpus"]
        # The program starts first, because its imports take longest.
        self._gemm = Child([*_GEMM, *(["cpu"] if gpus == 0 else [])])
        run, hosts = order["run"], order["hosts"]
        self.fact("versions", versions())
        self.fact("limits", limits())
        for space in spaces(run):
            self.fact("space", space)
        self.fact("names", names(hosts))
        self.fact("mtu", mtu(hosts, order["interface"] or os.environ.get("NCCL_SOCKET_IFNAME")))
        if run is not None:
            self.fact("config", config_hash(run))
        if gpus == 0:
            return
        told = read_gpus(os.environ)
        devices = told.pop("devices", [])
        self.fact("gpus", {"visible": visible_gpus(os.environ), **told})
        for device in devices:
            self.fact("device", device)
        if devices:
            self.fact("kernel", read_xids())

    def _write(self, order: Mapping[str, Any]) -> None:
        self.fact("write", write(Path(order["folder"]), self._name))

    def _read(self, order: Mapping[str, Any]) -> None:
        left = unseen(Path(order["folder"]), order["names"])
        self.fact("unseen", {"count": len(left), "names": left[:8]})

    def _wait(self, order: Mapping[str, Any]) -> None:
        assert self._gemm is not None
        problem = self._gemm.wait(order["imports"], order["seconds"])
        for record in self._gemm.records():
            self.fact("product" if "device" in record else "libraries", record)
        if problem is not None:
            self.fact("gemm", problem)


def main() -> None:
    """Answer orders until the last, or until standard input ends."""
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        # Warnings for the ranks, which reach every process of the job.
        signal.signal(number, signal.SIG_IGN)
    name = os.environ.get("HPCRUN_CHECK_NAME") or os.environ["SLURMD_NODENAME"]
    agent = PreflightAgent(name)
    agent.say(type="hello")
    try:
        for line in sys.stdin:
            if not agent.obey(json.loads(line)):
                break
    finally:
        agent.close()


_TICK, _LAST = 0.1, 5.0
_LONGEST = 300
_FOLDERS = ("/dev/shm", "/tmp")


class Child:
    """A program with a first line of output that reports the end of its imports.

    Its output goes to files in memory: a full disk is a finding of other checks.
    """

    def __init__(self, command: Sequence[str], *, folders: Sequence[str] = _FOLDERS) -> None:
        """Start ``command``; ``folders``: where the output goes if Python cannot make a file in memory.

        Raises:
            OSError: no folder takes a file, or the program cannot be started.
        """
        self._output, self._errors = (_memory_file(name, folders) for name in ("output", "errors"))
        self._process = subprocess.Popen(
            list(command), stdin=subprocess.DEVNULL, stdout=self._output, stderr=self._errors
        )

    def wait(self, imports: float, seconds: float) -> dict[str, Any] | None:
        """Wait for the end of the program; return the problem, or None.

        Args:
            imports: seconds until its first line.
            seconds: seconds from the first line to its end.
        """
        until, imported = time.monotonic() + imports, False
        while (code := self._process.poll()) is None:
            if not imported and b"\n" in _read(self._output):
                until, imported = time.monotonic() + seconds, True
            if time.monotonic() >= until:
                self.kill()
                what = f"no result within {seconds:g} s"
                return {"problem": what if imported else f"torch not imported in {imports:g} s"}
            time.sleep(_TICK)
        if code == 0:
            return None
        words = _read(self._errors).decode(errors="replace").strip().splitlines()
        return {"problem": (words or [f"exit code {code}"])[-1][:_LONGEST], "code": code}

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield the results that the program has printed."""
        for line in _read(self._output).splitlines():
            with contextlib.suppress(ValueError):
                yield json.loads(line)

    def kill(self) -> None:
        """End the program, if it still runs."""
        if self._process.poll() is None:
            self._process.kill()
            # A program that waits for an unavailable file server cannot be killed.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=_LAST)


def _memory_file(name: str, folders: Sequence[str]) -> int:
    """Return a descriptor of a new file in memory, or else in one of ``folders``; raises OSError."""
    # An interpreter that was built with a glibc before 2.27, such as conda-forge's, lacks the function.
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    refused = OSError("no folder is tried")
    for folder in folders:
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                return os.dup(file.fileno())
        except OSError as error:
            refused = error
    raise refused


def _read(descriptor: int) -> bytes:
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0)


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


if __name__ == "__main__":
    main()
