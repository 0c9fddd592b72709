"""Hosts from namespaces: a network, mount and UTS namespace per host, joined by a switch.

All interfaces are inside new namespaces: the bridge has its own namespace too, so that no
interface, address or route appears on the machine. A small process per host (its holder)
keeps the mount and UTS namespaces; other processes of the host join the holder's namespaces.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from .commands import attempt, clean_environment, run
from .errors import CommandFailed, Refusal
from .layout import NETNS_DIR, SWITCH, Layout
from .processes import ProcessId, empty, namespace_id, read_process

# /sys shows the interfaces of the namespace that mounted it, so each host mounts its own. A
# fresh /sys lacks the cgroup mounts, where programs look for their memory limit.
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
    """Return the input of `ip -batch` that makes the namespaces and the wires between them."""
    switch = layout.netns(SWITCH)
    lines = [f"netns add {layout.netns(host)}" for host in (SWITCH, *hosts)]
    lines += [
        f"link add {host} netns {switch} type veth peer name eth0 netns {layout.netns(host)}"
        for host in hosts
    ]
    return "\n".join(lines) + "\n"


def switch_batch(hosts: Sequence[str]) -> str:
    """Return the input of `ip -n SWITCH -batch`: a bridge with a port named after each host."""
    lines = ["link add br0 type bridge", "link set br0 up"]
    lines += [f"link set {host} master br0 up" for host in hosts]
    return "\n".join(lines) + "\n"


def host_batch(layout: Layout, host: str) -> str:
    """Return the input of `ip -n HOST -batch`: addresses, and no route out of the cluster."""
    return (
        "link set lo up\n"
        f"address add {layout.address(host)}/24 broadcast + dev eth0\n"
        "link set eth0 up\n"
    )


def ip_batch_argv(netns: str | None = None) -> list[str]:
    """Return the `ip` command that reads commands from standard input, inside ``netns`` if given."""
    inside = ["-n", netns] if netns else []
    return ["ip", *inside, "-batch", "-"]


def holder_argv(layout: Layout, host: str) -> list[str]:
    """Return the command of the process that makes the host's mount and UTS namespaces and keeps them."""
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
    """Return the command line that runs ``command`` as root on the host of ``holder``."""
    return ["nsenter", "--target", str(holder), "--net", "--mount", "--uts", "--", *command]


def as_user_argv(
    command: Sequence[str],
    *,
    uid: int,
    gid: int,
    cwd: str,
    env: Mapping[str, str],
) -> list[str]:
    """Return the command line for ``command`` as another user, with the user's groups and only ``env``."""
    become = ["setpriv", f"--reuid={uid}", f"--regid={gid}", "--init-groups", "--"]
    # env comes after setpriv, so that the user's permissions apply when it enters the directory.
    clean = ["env", "-i", f"--chdir={cwd}", *(f"{key}={value}" for key, value in env.items())]
    return [*become, *clean, *command]


def make_network(layout: Layout, hosts: Sequence[str]) -> None:
    """Make all namespaces, wires and addresses; raises `Refusal` if the kernel cannot."""
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
    """Start the holders in parallel and wait until each host has its name and mounts."""
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
    """Record a process that has just started; raises `Refusal` if it has ended already."""
    process = read_process(pid)
    if process is None:
        raise Refusal(f"{name} ended immediately", f"see {layout.log}")
    process.save(layout.process_record(name))
    return process


def holder_of(layout: Layout, host: str) -> int:
    """Return the pid of the host's holder; raises `Refusal` if the host is not up."""
    process = ProcessId.load(layout.process_record(f"holder-{host}"))
    if process is None or not process.alive():
        raise Refusal(
            f"host {host} of cluster {layout.name} is not up",
            f"run `devcluster up --name {layout.name}`",
        )
    return process.pid


def namespace_ids(names: Sequence[str]) -> set[tuple[int, int]]:
    """Return the identities of the named network namespaces, without those that are only a plain file.

    An `ip netns add` that was killed half-way leaves the file unmounted. The file then has the identity
    of a file, which no process has as its namespace.
    """
    own = namespace_id(Path("/proc/self/ns/net"))
    found = {namespace_id(NETNS_DIR / name) for name in names}
    return {item for item in found if item is not None and item != own}


def remove_hosts(layout: Layout) -> None:
    """End all processes in the cluster's namespaces, then remove the namespaces."""
    names = layout.existing_namespaces()
    empty(namespace_ids(names))
    for name in names:
        attempt(["ip", "netns", "delete", name])
        pin = NETNS_DIR / name
        # Left by an `ip netns add` that was killed before it mounted anything on it.
        pin.unlink(missing_ok=True)
