"""All paths, addresses and namespace names of one cluster."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path

from .errors import Refusal

NETNS_DIR = Path("/run/netns")
NETNS_PREFIX = "devcluster"
SWITCH = "switch"
# The longest path that fits a Unix socket's address is 107 bytes; ours end in run/munge.socket.
LONGEST_ROOT = 80


@dataclass(frozen=True)
class Layout:
    """Paths and names of the cluster ``name``; all files are below ``root``."""

    name: str
    root: Path

    def __post_init__(self) -> None:
        if len(str(self.root)) > LONGEST_ROOT:
            raise Refusal(
                f"--root {self.root} is too long for the sockets below it",
                f"take a path of at most {LONGEST_ROOT} characters",
            )

    @property
    def marker(self) -> Path:
        """Return the file that marks a cluster's directory; only marked directories are removed."""
        return self.root / "cluster.json"

    @property
    def ready(self) -> Path:
        """Return the file that marks a complete cluster: all its parts have answered once."""
        return self.root / "run" / "ready"

    @property
    def etc(self) -> Path:
        """Return the folder of configuration files; Slurm looks for all of them next to slurm.conf."""
        return self.root / "etc"

    @property
    def slurm_conf(self) -> Path:
        """Return the file for SLURM_CONF."""
        return self.etc / "slurm.conf"

    @property
    def hosts_file(self) -> Path:
        """Return the file that is mounted over /etc/hosts on every host."""
        return self.etc / "hosts"

    @property
    def run(self) -> Path:
        """Return the folder of sockets and process records."""
        return self.root / "run"

    @property
    def log(self) -> Path:
        """Return the folder of logs, one log per daemon."""
        return self.root / "log"

    @property
    def munge_socket(self) -> Path:
        """Return the socket of the munged for all hosts; every network namespace reaches a Unix socket."""
        return self.run / "munge.socket"

    @property
    def munge_key(self) -> Path:
        """Return the key of this cluster; clusters refuse each other's credentials."""
        return self.etc / "munge.key"

    @property
    def devices(self) -> Path:
        """Return the folder of device nodes that represent GPUs."""
        return self.root / "dev"

    @property
    def shared(self) -> Path:
        """Return the directory that all hosts share and the job user can write to."""
        return self.root / "shared"

    def seen_from(self, pid: int) -> Path:
        """Return the shared directory as the process ``pid`` sees it, which may be a mount of its host."""
        return Path(f"/proc/{pid}/root{self.shared}")

    @property
    def bin(self) -> Path:
        """Return the folder of wrappers for Slurm's commands outside the cluster."""
        return self.root / "bin"

    @property
    def directories(self) -> list[Path]:
        """Return the directories that `up` makes, parents first."""
        names = ("etc", "run", "log", "state", "spool", "dev", "bin", "shared", "cgroup", "store")
        return [*(self.root / name for name in names), self.root / "store" / "brick"]

    def daemon_log(self, daemon: str) -> Path:
        """Return the log of ``daemon`` (``slurmctld``, ``slurmd-node1``)."""
        return self.log / f"{daemon}.log"

    def process_record(self, process: str) -> Path:
        """Return the file with pid and start time of a process that `up` started."""
        return self.run / f"{process}.process"

    def netns(self, host: str) -> str:
        """Return the name of the network namespace.

        Dots separate the parts of the name, so no name is a prefix of another.
        """
        return f"{NETNS_PREFIX}.{self.name}.{host}"

    def netns_path(self, host: str) -> Path:
        """Return the file that pins the namespace."""
        return NETNS_DIR / self.netns(host)

    def existing_namespaces(self) -> list[str]:
        """Return the namespaces of this cluster that exist, recorded or left by a killed `up`."""
        if not NETNS_DIR.is_dir():
            return []
        prefix = self.netns("")
        return sorted(entry.name for entry in NETNS_DIR.iterdir() if entry.name.startswith(prefix))

    @property
    def subnet(self) -> str:
        """Return the first three bytes of the cluster's addresses, derived from its name.

        Clusters never share a wire, so equal subnets do no harm; different subnets only
        help a reader who compares two logs.
        """
        digest = zlib.crc32(self.name.encode())
        return f"10.{64 + digest % 64}.{digest // 64 % 256}"

    def address(self, host: str) -> str:
        """Return the IPv4 address of ``host``."""
        fixed = {"ctl": 2, "login": 3}
        number = fixed[host] if host in fixed else 10 + int(host.removeprefix("node"))
        return f"{self.subnet}.{number}"


def default_root(name: str) -> Path:
    """Return the default directory of a cluster."""
    return Path(f"/tmp/devcluster-{name}")
