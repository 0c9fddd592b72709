"""Shared file systems: a server on the controller's host, a FUSE mount per host.

``local`` is the machine's own disk, which all hosts see; it has no server that can stop and no
client with a stale cache. This module has the pure parts; `startup` starts and mounts.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .layout import Layout

GLUSTER_PORT = 24100
# How long a client waits for a stopped server before its calls fail with ENOTCONN.
GLUSTER_PING_TIMEOUT_S = 10


@dataclass(frozen=True)
class SharedFileSystem:
    """One kind: its server programs in the order of their start, each with its port."""

    ports: dict[str, int]


KINDS = {
    "local": SharedFileSystem(ports={}),
    "gluster": SharedFileSystem(ports={"glusterfsd": GLUSTER_PORT}),
}


def store(layout: Layout) -> Path:
    """Return the server's folder for the data."""
    return layout.root / "store"


def client_name(host: str) -> str:
    """Return the name of a host's mount process."""
    return f"mount-{host}"


def volume(name: str, kind: str, options: dict[str, str], below: str = "") -> str:
    """Return one translator of a GlusterFS volume file."""
    lines = [f"volume {name}", f"  type {kind}"]
    lines += [f"  option {key} {value}" for key, value in options.items()]
    if below:
        lines.append(f"  subvolumes {below}")
    return "\n".join([*lines, "end-volume", ""])


def gluster_server(layout: Layout) -> str:
    """Return the server's stack: a directory, locks across clients, a port."""
    listen = {"transport-type": "tcp", "transport.socket.listen-port": str(GLUSTER_PORT)}
    return "\n".join(
        [
            volume("disk", "storage/posix", {"directory": str(store(layout) / "brick")}),
            volume("brick", "features/locks", {}, "disk"),
            volume("server", "protocol/server", listen | {"auth.addr.brick.allow": "*"}, "brick"),
        ]
    )


def gluster_client() -> str:
    """Return the client's stack, with write-behind as in a default volume: only fsync makes data durable."""
    remote = {
        "transport-type": "tcp",
        "remote-host": "ctl",
        "remote-port": str(GLUSTER_PORT),
        "remote-subvolume": "brick",
        "ping-timeout": str(GLUSTER_PING_TIMEOUT_S),
    }
    return "\n".join(
        [
            volume("remote", "protocol/client", remote),
            volume("behind", "performance/write-behind", {}, "remote"),
        ]
    )


def configuration(layout: Layout, kind: str) -> dict[Path, str]:
    """Return the configuration files of the file system ``kind``."""
    if kind == "gluster":
        return {
            layout.etc / "gluster-server.vol": gluster_server(layout),
            layout.etc / "gluster-client.vol": gluster_client(),
        }
    return {}


def server_argv(layout: Layout) -> list[str]:
    """Return the command line of the server in the foreground."""
    return [
        *("glusterfsd", "--no-daemon", f"--volfile={layout.etc}/gluster-server.vol"),
        f"--log-file={layout.daemon_log('glusterfsd')}",
    ]


def client_argv(layout: Layout, host: str) -> list[str]:
    """Return the command line of a host's mount process in the foreground."""
    return [
        *("glusterfs", "--no-daemon", f"--volfile={layout.etc}/gluster-client.vol"),
        *(f"--log-file={layout.daemon_log(client_name(host))}", str(layout.shared)),
    ]
