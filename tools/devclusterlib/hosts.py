"""Hosts out of namespaces: one network, mount and UTS namespace each, joined by a switch.

Everything lies inside namespaces that we make: the bridge has a namespace of its own, so that no
interface, address or route appears on the machine itself. A small process per host (its holder)
keeps the mount and UTS namespaces; whatever runs on the host is started into the holder's.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from .commands import attempt, clean_environment, run
from .errors import CommandFailed, Refusal
from .layout import NETNS_DIR, SWITCH, Layout
from .processes import ProcessId, empty, namespace_id, read_process

# /sys shows the interfaces of the namespace that mounted it, so a host needs one of its own; a
# fresh /sys lacks the cgroup mounts, in which programs look for their memory limit.
HOLDER_SCRIPT = """set -e
hostname "$1"
mount --bind "$2" /etc/hosts
mount --rbind /sys/fs/cgroup "$3"
mount -t sysfs sysfs /sys
mount --rbind "$3" /sys/fs/cgroup
umount -l "$3"
echo ready
exec sleep infinity >/dev/null
"""


def network_batch(layout: Layout, hosts: Sequence[str]) -> str:
    """Input of `ip -batch` that makes the namespaces and the wires between them."""
    switch = layout.netns(SWITCH)
    lines = [f"netns add {layout.netns(host)}" for host in (SWITCH, *hosts)]
    lines += [
        f"link add {host} netns {switch} type veth peer name eth0 netns {layout.netns(host)}"
        for host in hosts
    ]
    return "\n".join(lines) + "\n"


def switch_batch(hosts: Sequence[str]) -> str:
    """Input of `ip -n SWITCH -batch`: a bridge with a port named after each host."""
    lines = ["link add br0 type bridge", "link set br0 up"]
    lines += [f"link set {host} master br0 up" for host in hosts]
    return "\n".join(lines) + "\n"


def host_batch(layout: Layout, host: str) -> str:
    """Input of `ip -n HOST -batch`: addresses; no route leads out of the cluster."""
    return (
        "link set lo up\n"
        f"address add {layout.address(host)}/24 broadcast + dev eth0\n"
        "link set eth0 up\n"
    )


def ip_batch_argv(netns: str | None = None) -> list[str]:
    """`ip` reading commands from standard input, inside ``netns`` if given."""
    inside = ["-n", netns] if netns else []
    return ["ip", *inside, "-batch", "-"]


def holder_argv(layout: Layout, host: str) -> list[str]:
    """Process that makes the host's mount and UTS namespaces and keeps them."""
    return [
        "nsenter",
        f"--net={layout.netns_path(host)}",
        "unshare",
        "--mount",
        "--uts",
        "--propagation",
        "private",
        "sh",
        "-c",
        HOLDER_SCRIPT,
        "holder",
        host,
        str(layout.hosts_file),
        str(layout.root / "cgroup"),
    ]


def enter_argv(holder: int, command: Sequence[str]) -> list[str]:
    """``command`` as root on the host that ``holder`` keeps."""
    return ["nsenter", "--target", str(holder), "--net", "--mount", "--uts", "--", *command]


def as_user_argv(
    command: Sequence[str],
    *,
    uid: int,
    gid: int,
    cwd: str,
    env: Mapping[str, str],
) -> list[str]:
    """``command`` as another user, with that user's groups and no environment but ``env``."""
    become = ["setpriv", f"--reuid={uid}", f"--regid={gid}", "--init-groups", "--"]
    # env sits behind setpriv, so that the directory is entered with the user's own rights.
    clean = ["env", "-i", f"--chdir={cwd}", *(f"{key}={value}" for key, value in env.items())]
    return [*become, *clean, *command]


def make_network(layout: Layout, hosts: Sequence[str]) -> None:
    """Make all namespaces, wires and addresses; what the kernel lacks becomes a refusal."""
    try:
        run(ip_batch_argv(), stdin=network_batch(layout, hosts))
        run(ip_batch_argv(layout.netns(SWITCH)), stdin=switch_batch(hosts))
        for host in hosts:
            run(ip_batch_argv(layout.netns(host)), stdin=host_batch(layout, host))
    except CommandFailed as error:
        raise Refusal(
            f"this kernel or container does not let us make networks ({error.words})",
            "it needs network namespaces, veth and bridge: "
            "on a container engine, start the container with --privileged",
        ) from error


def start_holders(layout: Layout, hosts: Sequence[str]) -> None:
    """Start the holders side by side and wait until each host has its name and mounts."""
    started = {}
    for host in hosts:
        process = subprocess.Popen(
            holder_argv(layout, host),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=clean_environment(),
            cwd="/",
            start_new_session=True,
            text=True,
        )
        remember(layout, f"holder-{host}", process.pid)
        started[host] = process
    for host, process in started.items():
        assert process.stdout is not None
        assert process.stderr is not None
        with process.stdout, process.stderr:
            if process.stdout.readline() != "ready\n":
                words = " ".join(process.stderr.read().split())
                raise Refusal(
                    f"host {host} could not get its own mounts: {words}",
                    "on a container engine, start the container with --privileged",
                )


def remember(layout: Layout, name: str, pid: int) -> ProcessId:
    """Record a process that we just started; it must still be there."""
    process = read_process(pid)
    if process is None:
        raise Refusal(f"{name} ended at once", f"see {layout.log}")
    process.save(layout.process_record(name))
    return process


def holder_of(layout: Layout, host: str) -> int:
    """Pid of the host's holder, or a refusal when the host is not up."""
    process = ProcessId.load(layout.process_record(f"holder-{host}"))
    if process is None or not process.alive():
        raise Refusal(
            f"host {host} of cluster {layout.name} is not up",
            f"run `devcluster up --name {layout.name}`",
        )
    return process.pid


def namespace_ids(names: Sequence[str]) -> set[tuple[int, int]]:
    """Identities of the named network namespaces, without those that are only a plain file.

    `ip netns add` killed half-way leaves the file unmounted: it then lies on the file system of
    its directory, whose identity no process has.
    """
    own = namespace_id(Path("/proc/self/ns/net"))
    found = {namespace_id(NETNS_DIR / name) for name in names}
    return {item for item in found if item is not None and item != own}


def remove_hosts(layout: Layout) -> None:
    """End everything that lives in the cluster's namespaces, then remove these."""
    names = layout.existing_namespaces()
    empty(namespace_ids(names))
    for name in names:
        attempt(["ip", "netns", "delete", name])
        pin = NETNS_DIR / name
        # Left by an `ip netns add` that was killed before it mounted anything on it.
        pin.unlink(missing_ok=True)
