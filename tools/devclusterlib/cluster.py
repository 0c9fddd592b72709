"""One cluster from `up` to `down`: the order in which its parts are made and removed.

`up` may be killed between any two lines. So the directory is registered before it exists, its
marker is written before anything else, and `down` looks for what there is, not for what a record
says there should be.
"""

from __future__ import annotations

import os
import shutil
import signal
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import accounting, daemons, hosts, registry, sharedfs, slurmconf, users, wrappers
from .commands import SYSTEM_PATH, attempt, run
from .errors import CommandFailed, Refusal
from .layout import Layout, default_root
from .processes import ProcessId, end
from .spec import ClusterSpec

NVIDIA_MAJOR = 195


@dataclass(frozen=True)
class Cluster:
    """A cluster that is (or was) up: where it lies and how it was asked for."""

    layout: Layout
    spec: ClusterSpec

    def argv(
        self,
        host: str,
        command: Sequence[str],
        *,
        user: str | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> list[str]:
        """Command line that runs ``command`` on ``host`` as ``user`` (default: the job user).

        The environment is a fresh login's plus ``env``; ``cwd`` defaults to the shared directory.
        """
        if host not in self.spec.host_names:
            raise Refusal(
                f"cluster {self.spec.name} has no host {host}",
                f"it has {', '.join(self.spec.host_names)}",
            )
        account = users.require(user or self.spec.user)
        environment = account.environment(SYSTEM_PATH, str(self.layout.slurm_conf))
        inner = hosts.as_user_argv(
            command,
            uid=account.uid,
            gid=account.gid,
            cwd=cwd or str(self.layout.shared),
            env=environment | dict(env or {}),
        )
        return hosts.enter_argv(hosts.holder_of(self.layout, host), inner)

    def admin(self, command: Sequence[str]) -> str:
        """Output of a Slurm command run by root on the controller's host."""
        return run(self.argv("ctl", command, user="root", cwd="/"))


def load(name: str, root: Path | None = None) -> Cluster:
    """The cluster ``name`` as it was recorded, or a refusal when there is none."""
    layout = locate(name, root)
    spec = stored_spec(layout)
    if spec is None:
        raise Refusal(f"there is no cluster {name}", f"run `devcluster up --name {name}`")
    return Cluster(layout, spec)


def locate(name: str, root: Path | None) -> Layout:
    """Layout of ``name``: where it is registered, else in ``root``, else in the default place."""
    entry = registry.find(name)
    if entry is not None:
        if root is not None and root.absolute() != entry.root:
            raise Refusal(
                f"cluster {name} lies in {entry.root}", "leave --root out, or take another --name"
            )
        return Layout(name, entry.root)
    return Layout(name, root.absolute() if root is not None else default_root(name))


def stored_spec(layout: Layout) -> ClusterSpec | None:
    """The spec in the cluster's directory; None when there is none or it was torn by a kill."""
    try:
        return ClusterSpec.from_json(layout.marker.read_text())
    except (OSError, ValueError, KeyError, TypeError):
        return None


def up(
    spec: ClusterSpec, *, root: Path | None = None, owner: ProcessId | None = None
) -> tuple[Cluster, list[str]]:
    """Bring the cluster up; return it and which daemons were started now.

    A cluster that is up already only gets back the daemons that are missing; leftovers of one
    that was killed half-way are removed first.
    """
    with registry.exclusive():
        layout = locate(spec.name, root)
        cluster = Cluster(layout, spec)
        if holders_alive(layout, spec):
            existing = stored_spec(layout)
            if existing is not None and existing != spec:
                raise Refusal(
                    f"cluster {spec.name} is up with other options "
                    f"({'; '.join(existing.difference(spec))})",
                    f"run `devcluster down --name {spec.name}` first, or take another --name",
                )
            return cluster, start_missing(cluster)
        remove(layout)
        claim(layout)
        registry.register(registry.Entry(spec.name, layout.root, owner))
        try:
            build(cluster)
        except BaseException:
            # Also at an interrupt: nothing is left half made.
            remove(layout)
            finish_removal(spec.name, spec.user)
            raise
        return cluster, daemons.slurm_daemons(spec)


def holders_alive(layout: Layout, spec: ClusterSpec) -> bool:
    """Whether the cluster was completed once and none of its hosts has gone."""
    if not layout.ready.exists():
        return False
    stored = stored_spec(layout) or spec
    return all(daemons.recorded(layout, f"holder-{host}") for host in stored.host_names)


def claim(layout: Layout) -> None:
    """Refuse a directory that holds something else, or that another user planted."""
    try:
        status = layout.root.lstat()
    except FileNotFoundError:
        return
    mine = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    if not mine or any(layout.root.iterdir()):
        raise Refusal(
            f"{layout.root} exists and is not a cluster's", "remove it, or take another --root"
        )


def build(cluster: Cluster) -> None:
    """Make everything, in the order in which one part needs another."""
    layout, spec = cluster.layout, cluster.spec
    account = users.ensure(spec.user)
    layout.root.mkdir(mode=0o755, parents=True, exist_ok=True)
    layout.marker.write_text(spec.to_json())
    for directory in layout.directories:
        directory.mkdir(mode=0o755)
    os.chown(layout.shared, account.uid, account.gid)
    write_configuration(cluster)
    make_devices(layout, max(spec.gpus))
    hosts.make_network(layout, spec.host_names)
    hosts.start_holders(layout, spec.host_names)
    sharedfs.mount(layout, spec, account)
    wrappers.write(cluster.layout, spec.name)
    start_missing(cluster)
    layout.ready.touch()


def write_configuration(cluster: Cluster) -> None:
    """Write every configuration file, and the key that only this cluster's munged knows."""
    layout, spec = cluster.layout, cluster.spec
    (layout.etc / "slurm.conf").write_text(slurmconf.slurm_conf(spec, layout))
    (layout.etc / "gres.conf").write_text(slurmconf.gres_conf(spec, layout))
    (layout.etc / "cgroup.conf").write_text(slurmconf.cgroup_conf())
    layout.hosts_file.write_text(slurmconf.hosts_file(spec, layout))
    write_private(layout.munge_key, os.urandom(128))
    if spec.accounting:
        write_private(layout.etc / "slurmdbd.conf", slurmconf.slurmdbd_conf(layout).encode())
        write_private(layout.etc / "database.sql", accounting.database_sql().encode())


def write_private(path: Path, content: bytes) -> None:
    """Write a file that is root's alone from its first byte on."""
    path.touch(mode=0o600)
    path.write_bytes(content)


def make_devices(layout: Layout, count: int) -> None:
    """Device nodes for Slurm to count; no driver of the real GPUs is ever opened through them."""
    for minor in range(count):
        path = layout.devices / f"nvidia{minor}"
        try:
            os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(NVIDIA_MAJOR, minor))
        except OSError as error:
            raise Refusal(
                f"cannot make the device node {path}: {error.strerror}",
                "start the container with --privileged, or give --gpus 0",
            ) from error


def start_missing(cluster: Cluster) -> list[str]:
    """Start the daemons that do not run and wait until the cluster takes jobs."""
    layout, spec = cluster.layout, cluster.spec
    wanted = daemons.slurm_daemons(spec)
    missing = [name for name in wanted if daemons.recorded(layout, name) is None]
    if "munged" in missing:
        layout.munge_socket.unlink(missing_ok=True)
        daemons.start(layout, "munged")
        daemons.wait_for(layout, "munge socket", layout.munge_socket.exists, needs=["munged"])
    if spec.accounting and ("mariadbd" in missing or "slurmdbd" in missing):
        accounting.start(cluster.layout, cluster.admin, spec)
    if "slurmctld" in missing:
        start_controller(cluster)
    for name in missing:
        daemons.start(layout, name)
    daemons.wait_for(
        layout,
        "idle nodes",
        lambda: all_nodes_answer(cluster),
        needs=["slurmctld", *(daemons.slurmd_name(node) for node in spec.node_names)],
    )
    return missing


def start_controller(cluster: Cluster) -> None:
    """Start slurmctld and return once it answers."""
    daemons.start(cluster.layout, "slurmctld")
    daemons.wait_for(
        cluster.layout,
        "answer of slurmctld",
        lambda: answers(cluster, ["scontrol", "ping"], "UP"),
        needs=["slurmctld"],
    )


def answers(cluster: Cluster, command: list[str], word: str) -> bool:
    """Whether a Slurm command succeeds and says ``word``."""
    try:
        return word in cluster.admin(command)
    except CommandFailed:
        return False


def all_nodes_answer(cluster: Cluster) -> bool:
    """Whether every node has registered; a node that a person set down counts as answering."""
    states = node_states(cluster)
    return len(states) == cluster.spec.nodes and all(registered(state) for state in states.values())


def node_states(cluster: Cluster) -> dict[str, str]:
    """State of every node, empty while slurmctld does not answer."""
    try:
        return parse_node_states(cluster.admin(node_states_command()))
    except CommandFailed:
        return {}


def node_states_command() -> list[str]:
    """One line a node: its name and state in full, with Slurm's suffix signs."""
    return ["sinfo", "--noheader", "--Node", "--format=%N %T"]


def parse_node_states(text: str) -> dict[str, str]:
    """State of every node; a node in two partitions stands there twice."""
    return dict(line.split(maxsplit=1) for line in text.splitlines() if line.strip())


def registered(state: str) -> bool:
    """Whether a state tells of a slurmd that answers; ``*`` and ``#`` mark one that does not."""
    return state[-1] not in "*#~" and not state.startswith(("unknown", "future"))


def down(name: str, root: Path | None = None) -> bool:
    """Remove the cluster or what is left of it; whether there was anything."""
    with registry.exclusive():
        layout = locate(name, root)
        spec = stored_spec(layout)
        found = (
            registry.find(name) is not None
            or layout.marker.exists()
            or bool(layout.existing_namespaces())
        )
        remove(layout)
        finish_removal(name, spec.user if spec is not None else None)
        return found


def remove(layout: Layout) -> None:
    """End the cluster's processes, then remove its namespaces, mounts and directory."""
    hosts.remove_hosts(layout)
    # What was started an instant before `up` was killed has a record, but no namespace yet.
    records = [ProcessId.load(path) for path in layout.run.glob("*.process")]
    end([item for item in records if item is not None], signal.SIGKILL, 5.0)
    if layout.marker.exists():
        unmount_below(layout.root)
        for entry in sorted(layout.root.iterdir(), key=lambda path: path == layout.marker):
            remove_path(entry)
        layout.root.rmdir()


def remove_path(path: Path) -> None:
    """Remove a file or a tree; the marker is asked for last, so that a killed `down` resumes."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def unmount_below(root: Path) -> None:
    """Detach what is mounted below ``root``, so that no tree of somebody else is removed."""
    mounted = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    for target in sorted((item for item in mounted if item.startswith(f"{root}/")), reverse=True):
        attempt(["umount", "--lazy", target])


def finish_removal(name: str, user: str | None) -> None:
    """Forget the cluster and remove its user, if that is ours and no other cluster's."""
    registry.forget(name)
    others = [stored_spec(Layout(entry.name, entry.root)) for entry in registry.entries()]
    if user is not None:
        users.remove_if_ours(user, [spec for spec in others if spec is not None])


def down_abandoned() -> list[str]:
    """Remove the clusters whose owner process has ended; return their names."""
    names = [entry.name for entry in registry.entries() if entry.abandoned]
    for name in names:
        down(name)
    return names
