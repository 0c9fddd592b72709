"""Make a cluster's files and start missing daemons, each one after its dependencies answer."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from . import accounting, daemons, hosts, sharedfs, slurmconf, users
from .cluster import Cluster, node_states, registered
from .commands import attempt, run
from .errors import CommandFailed, Refusal
from .layout import Layout

NVIDIA_MAJOR = 195


def write_configuration(cluster: Cluster) -> None:
    """Write every configuration file, and the key of this cluster's munged."""
    layout, spec = cluster.layout, cluster.spec
    (layout.etc / "slurm.conf").write_text(slurmconf.slurm_conf(spec, layout))
    (layout.etc / "gres.conf").write_text(slurmconf.gres_conf(spec, layout))
    (layout.etc / "cgroup.conf").write_text(slurmconf.cgroup_conf())
    layout.hosts_file.write_text(slurmconf.hosts_file(spec, layout))
    for path, text in sharedfs.configuration(layout, spec.shared_fs).items():
        path.write_text(text)
    write_private(layout.munge_key, os.urandom(128))
    if spec.accounting:
        write_private(layout.etc / "slurmdbd.conf", slurmconf.slurmdbd_conf(spec, layout).encode())
        write_private(layout.etc / "database.sql", accounting.database_sql().encode())


def write_private(path: Path, content: bytes) -> None:
    """Write a file that only root can read, from its first byte on."""
    path.touch(mode=0o600)
    path.write_bytes(content)


def make_devices(layout: Layout, count: int) -> None:
    """Make device nodes for Slurm to count; they never open a driver of the real GPUs."""
    for minor in range(count):
        path = layout.devices / f"nvidia{minor}"
        try:
            os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(NVIDIA_MAJOR, minor))
            path.chmod(0o666)
        except OSError as error:
            raise Refusal(
                f"cannot make the device node {path}: {error.strerror}",
                "start the container with --privileged, or give --gpus 0",
            ) from error


def start_missing(cluster: Cluster) -> list[str]:
    """Start the missing daemons and return their names once the cluster accepts jobs."""
    layout = cluster.layout
    missing = [
        name for name in daemons.names(cluster.spec) if daemons.recorded(layout, name) is None
    ]
    for group in in_turn(missing):
        start(cluster, group)
    return missing


def in_turn(names: Sequence[str]) -> list[list[str]]:
    """Return lists of names that may start together: the same program on many hosts."""
    groups: list[list[str]] = []
    for name in names:
        kind = name.partition("-")[0]
        if groups and groups[-1][0].partition("-")[0] == kind:
            groups[-1].append(name)
        else:
            groups.append([name])
    return groups


def start(cluster: Cluster, names: Sequence[str]) -> None:
    """Start independent daemons and wait until all of them answer."""
    for name in names:
        prepare(cluster, name)
        daemons.start(cluster.layout, cluster.spec, name)
    for name in names:
        daemons.wait_for(cluster.layout, partial(answers, cluster, name), name)
    for name in names:
        complete(cluster, name)


def prepare(cluster: Cluster, name: str) -> None:
    """Make the files that a daemon needs, and remove the files of a killed predecessor."""
    layout = cluster.layout
    if name == "munged":
        layout.munge_socket.unlink(missing_ok=True)
    elif name == "mariadbd" and not (layout.root / "db").exists():
        holder = hosts.holder_of(layout, "ctl")
        run(hosts.enter_argv(holder, accounting.install_db_argv(layout)))
    elif name.startswith("mount-"):
        host = daemons.host_of(name)
        while mounted(layout, host):
            detach = ["umount", "--lazy", str(layout.shared)]
            attempt(hosts.enter_argv(hosts.holder_of(layout, host), detach))


def complete(cluster: Cluster, name: str) -> None:
    """Do the steps that need a running daemon."""
    spec, layout = cluster.spec, cluster.layout
    if name == "slurmdbd" and spec.name not in cluster.admin(accounting.list_command()).split():
        for command in accounting.entry_commands(spec):
            cluster.admin(command)
    elif name == f"mount-{spec.node_names[0]}":
        account = users.require(spec.user)
        shared = layout.seen_from(hosts.holder_of(layout, daemons.host_of(name)))
        os.chown(shared, account.uid, account.gid)
        shared.chmod(0o755)


def answers(cluster: Cluster, name: str) -> bool:
    """Return True if a daemon works, asked with the program of its users."""
    layout, spec = cluster.layout, cluster.spec
    if name == "munged":
        return layout.munge_socket.exists()
    if name == "mariadbd":
        return listens(layout, "ctl", slurmconf.DATABASE_PORT)
    if name == "slurmdbd":
        return succeeds(cluster, accounting.list_command())
    if name == "slurmctld":
        return succeeds(cluster, ["scontrol", "ping"])
    if name.startswith("slurmd-"):
        return registered(node_states(cluster).get(daemons.host_of(name), "unknown"))
    if name.startswith("mount-"):
        return mounted(layout, daemons.host_of(name))
    return listens(layout, "ctl", sharedfs.KINDS[spec.shared_fs].ports[name])


def succeeds(cluster: Cluster, command: list[str]) -> bool:
    """Return True if a Slurm command succeeds."""
    try:
        cluster.admin(command)
    except CommandFailed:
        return False
    return True


def listens(layout: Layout, host: str, port: int) -> bool:
    """Return True if a program on ``host`` listens at ``port``."""
    table = Path(f"/proc/{hosts.holder_of(layout, host)}/net/tcp").read_text()
    return port in listening_ports(table)


def listening_ports(table: str) -> set[int]:
    """Return the ports in state LISTEN (0A) of /proc/net/tcp."""
    rows = [line.split() for line in table.splitlines()[1:]]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A"}


def mounted(layout: Layout, host: str) -> bool:
    """Return True if ``host`` has a mount at the shared directory."""
    table = Path(f"/proc/{hosts.holder_of(layout, host)}/mountinfo").read_text()
    return any(line.split()[4] == str(layout.shared) for line in table.splitlines())
