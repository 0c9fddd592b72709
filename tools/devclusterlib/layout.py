"""Every path, address and namespace name of one cluster, so that no other module invents one."""

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
    """Where things of the cluster ``name`` lie; everything on disk is under ``root``."""

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
        """File that says the directory is a cluster's; nothing is removed without it."""
        return self.root / "cluster.json"

    @property
    def ready(self) -> Path:
        """Exists once the whole cluster answered; its absence means a half-made one."""
        return self.root / "run" / "ready"

    @property
    def etc(self) -> Path:
        """Configuration files; Slurm looks for all of them beside slurm.conf."""
        return self.root / "etc"

    @property
    def slurm_conf(self) -> Path:
        """The file that SLURM_CONF names."""
        return self.etc / "slurm.conf"

    @property
    def hosts_file(self) -> Path:
        """Bound over /etc/hosts on every host."""
        return self.etc / "hosts"

    @property
    def run(self) -> Path:
        """Sockets, process records."""
        return self.root / "run"

    @property
    def log(self) -> Path:
        """One log a daemon."""
        return self.root / "log"

    @property
    def munge_socket(self) -> Path:
        """One munged serves all hosts: a Unix socket is reached from any network namespace."""
        return self.run / "munge.socket"

    @property
    def munge_key(self) -> Path:
        """Key of this cluster alone, so that two clusters refuse each other's credentials."""
        return self.etc / "munge.key"

    @property
    def devices(self) -> Path:
        """Device nodes that stand for GPUs."""
        return self.root / "dev"

    @property
    def shared(self) -> Path:
        """The file system that all hosts share and the job user writes to."""
        return self.root / "shared"

    def seen_from(self, pid: int) -> Path:
        """The shared directory as the process ``pid`` sees it: a mount of its own host, maybe."""
        return Path(f"/proc/{pid}/root{self.shared}")

    @property
    def bin(self) -> Path:
        """Wrappers of Slurm's commands for a shell outside the cluster."""
        return self.root / "bin"

    @property
    def directories(self) -> list[Path]:
        """Directories that `up` makes, parents first."""
        names = ("etc", "run", "log", "state", "spool", "dev", "bin", "shared", "cgroup", "store")
        return [*(self.root / name for name in names), self.root / "store" / "brick"]

    def daemon_log(self, daemon: str) -> Path:
        """Log of ``daemon`` (``slurmctld``, ``slurmd-node1``)."""
        return self.log / f"{daemon}.log"

    def process_record(self, process: str) -> Path:
        """Where pid and start time of a process that `up` started are kept."""
        return self.run / f"{process}.process"

    def netns(self, host: str) -> str:
        """Name of the network namespace; dots part it, so that no name is another's prefix."""
        return f"{NETNS_PREFIX}.{self.name}.{host}"

    def netns_path(self, host: str) -> Path:
        """File that pins the namespace."""
        return NETNS_DIR / self.netns(host)

    def existing_namespaces(self) -> list[str]:
        """Namespaces of this cluster that exist, recorded or left over from a killed `up`."""
        if not NETNS_DIR.is_dir():
            return []
        prefix = self.netns("")
        return sorted(entry.name for entry in NETNS_DIR.iterdir() if entry.name.startswith(prefix))

    @property
    def subnet(self) -> str:
        """First three bytes of the cluster's addresses, derived from its name.

        Clusters never share a wire, so two names with one subnet do no harm; different ones only
        help the person who reads two logs.
        """
        digest = zlib.crc32(self.name.encode())
        return f"10.{64 + digest % 64}.{digest // 64 % 256}"

    def address(self, host: str) -> str:
        """IPv4 address of ``host``."""
        fixed = {"ctl": 2, "login": 3}
        number = fixed[host] if host in fixed else 10 + int(host.removeprefix("node"))
        return f"{self.subnet}.{number}"


def default_root(name: str) -> Path:
    """Directory of a cluster whose person named none."""
    return Path(f"/tmp/devcluster-{name}")
