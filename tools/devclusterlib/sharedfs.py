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
    "moosefs": SharedFileSystem(ports={"mfsmaster": 9421, "mfschunkserver": 9422}),
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


def moosefs_common(layout: Layout) -> dict[str, str]:
    """Return settings of both servers; the defaults need a system user and the highest priority."""
    return {
        "WORKING_USER": "root",
        "WORKING_GROUP": "root",
        "NICE_LEVEL": "0",
        "DISABLE_OOM_KILLER": "0",
        "DATA_PATH": str(store(layout)),
    }


def moosefs_settings(settings: dict[str, str]) -> str:
    """Return the text of an mfs*.cfg."""
    return "".join(f"{key} = {value}\n" for key, value in settings.items())


def configuration(layout: Layout, kind: str) -> dict[Path, str]:
    """Return the configuration files of the file system ``kind``."""
    if kind == "gluster":
        return {
            layout.etc / "gluster-server.vol": gluster_server(layout),
            layout.etc / "gluster-client.vol": gluster_client(),
        }
    if kind == "moosefs":
        common = moosefs_common(layout)
        master = common | {"EXPORTS_FILENAME": str(layout.etc / "mfsexports.cfg")}
        chunks = common | {
            "MASTER_HOST": "ctl",
            "HDD_CONF_FILENAME": str(layout.etc / "mfshdd.cfg"),
            "HDD_TEST_SPEED": "0",
        }
        return {
            layout.etc / "mfsmaster.cfg": moosefs_settings(master),
            layout.etc / "mfschunkserver.cfg": moosefs_settings(chunks),
            layout.etc / "mfsexports.cfg": "* / rw,alldirs,admin,maproot=0:0\n",
            layout.etc / "mfshdd.cfg": f"{store(layout) / 'brick'}\n",
            # The master accepts this text as the metadata of an empty file system.
            store(layout) / "metadata.mfs": "MFSM NEW",
        }
    return {}


def server_argv(layout: Layout, server: str) -> list[str]:
    """Return the command line of a server in the foreground."""
    if server == "glusterfsd":
        return [
            "glusterfsd",
            "--no-daemon",
            f"--volfile={layout.etc}/gluster-server.vol",
            f"--log-file={layout.daemon_log(server)}",
        ]
    return [server, "-f", "-c", f"{layout.etc}/{server}.cfg", "start"]


def client_argv(layout: Layout, kind: str, host: str) -> list[str]:
    """Return the command line of a host's mount process in the foreground."""
    if kind == "gluster":
        return [
            "glusterfs",
            "--no-daemon",
            f"--volfile={layout.etc}/gluster-client.vol",
            f"--log-file={layout.daemon_log(client_name(host))}",
            str(layout.shared),
        ]
    return [
        *("mfsmount", "-f", "-H", "ctl", str(layout.shared)),
        *("-o", "nonempty,mfsnice=0,mfsallowoomkiller"),
    ]
