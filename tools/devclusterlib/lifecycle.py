"""`up` and `down`: the order in which the parts of a cluster are made and removed.

`up` may be killed between any two lines. So it registers the directory before it creates it, and
writes the marker before any other file. `down` removes what exists, independent of the
records.
"""

from __future__ import annotations

import os
import shutil
import signal
import stat
from pathlib import Path

from . import daemons, hosts, registry, startup, users, wrappers
from .cluster import Cluster, locate, stored_spec
from .commands import attempt
from .errors import Refusal
from .layout import Layout
from .processes import ProcessId, end
from .spec import ClusterSpec


def up(
    spec: ClusterSpec, *, root: Path | None = None, owner: ProcessId | None = None
) -> tuple[Cluster, list[str]]:
    """Bring the cluster up; return the cluster and the names of the daemons that this call started.

    For a cluster that is up already, only missing daemons start. Remains
    of a killed `up` are removed first.
    """
    # The job user must get into the directories, whatever the caller's umask is.
    os.umask(0o022)
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
            return cluster, startup.start_missing(cluster)
        remove(layout)
        claim(layout)
        registry.register(registry.Entry(spec.name, layout.root, spec.user, owner))
        try:
            build(cluster)
        except BaseException:
            # Also at an interrupt: no incomplete cluster remains.
            remove(layout)
            finish_removal(spec.name)
            raise
        return cluster, daemons.names(spec)


def holders_alive(layout: Layout, spec: ClusterSpec) -> bool:
    """Return True if the cluster was completed once and all its hosts still exist."""
    if not layout.ready.exists():
        return False
    stored = stored_spec(layout) or spec
    return all(daemons.recorded(layout, f"holder-{host}") for host in stored.host_names)


def claim(layout: Layout) -> None:
    """Refuse a directory with other content, or a directory that another user made."""
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
    """Make all parts, in the order of their dependencies."""
    layout, spec = cluster.layout, cluster.spec
    layout.root.mkdir(mode=0o755, parents=True, exist_ok=True)
    layout.marker.write_text(spec.to_json())
    account = users.ensure(spec.user)
    for directory in layout.directories:
        directory.mkdir(mode=0o755)
    os.chown(layout.shared, account.uid, account.gid)
    startup.write_configuration(cluster)
    startup.make_devices(layout, max(spec.gpus))
    hosts.make_network(layout, spec.host_names)
    hosts.start_holders(layout, spec.host_names)
    wrappers.write(cluster.layout, spec.name)
    startup.start_missing(cluster)
    layout.ready.touch()


def down(name: str, root: Path | None = None) -> bool:
    """Remove the cluster or its remains; return True if there was anything to remove."""
    with registry.exclusive():
        layout = locate(name, root)
        found = (
            registry.find(name) is not None
            or layout.marker.exists()
            or bool(layout.existing_namespaces())
        )
        remove(layout)
        finish_removal(name)
        return found


def remove(layout: Layout) -> None:
    """End the cluster's processes, then remove its namespaces, mounts and directory."""
    hosts.remove_hosts(layout)
    # A process that started just before `up` was killed has a record, but no namespace yet.
    records = [ProcessId.load(path) for path in layout.run.glob("*.process")]
    end([item for item in records if item is not None], signal.SIGKILL, 5.0)
    if layout.marker.exists():
        unmount_below(layout.root)
        for entry in sorted(layout.root.iterdir(), key=lambda path: path == layout.marker):
            remove_path(entry)
    # An empty directory without a marker is what is left between two of the lines above or in
    # `build`; one with something in it is not ours.
    if registry.find(layout.name) is not None and is_empty(layout.root):
        layout.root.rmdir()


def is_empty(directory: Path) -> bool:
    """Return True for an existing directory without content."""
    return directory.is_dir() and not directory.is_symlink() and not any(directory.iterdir())


def remove_path(path: Path) -> None:
    """Remove a file or a tree; the marker comes last, so that a killed `down` can resume."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def unmount_below(root: Path) -> None:
    """Detach all mounts below ``root``, so that no other tree is removed."""
    mounted = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    for target in sorted((item for item in mounted if item.startswith(f"{root}/")), reverse=True):
        attempt(["umount", "--lazy", target])


def finish_removal(name: str) -> None:
    """Remove the user that this tool made, unless another cluster needs it, and forget the cluster."""
    entry = registry.find(name)
    if entry is not None:
        others = [item.user for item in registry.entries() if item.name != name]
        users.remove_if_ours(entry.user, others)
    registry.forget(name)


def down_abandoned() -> list[str]:
    """Remove the clusters with an owner process that has ended; return their names."""
    names = [entry.name for entry in registry.entries() if entry.abandoned]
    for name in names:
        down(name)
    return names
