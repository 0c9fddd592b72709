"""The facts about a node's network that need no other node: its interface, speed, name and variables."""

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpcrun.ranks.addresses import is_loopback, is_only_loopback
from hpcrun.ranks.interfaces import chosen_interfaces, own_interfaces

_MOST = 6


def read_network(
    addresses: Mapping[str, str],
    name: str,
    root: Path = Path("/"),
    environ: Mapping[str, str] = os.environ,
) -> dict[str, Any]:
    """Return the facts about this node, as the arguments of `NodeNetwork`. The answer is one short line.

    Args:
        addresses: of each node for the other nodes.
        name: of this node.
        root: folder with /sys and /proc; tests use another folder.
        environ: the environment of the job.
    """
    interfaces = own_interfaces()
    own = {address: interface for interface, of in interfaces.items() for address in of}
    used = own.get(addresses.get(name, ""))
    local = is_loopback(addresses.get(name, ""))
    others = [other for other, address in addresses.items() if other != name and address in own]
    return {
        "host": _host(root),
        "interface": used,
        "speed": _speed(root, used),
        "half_duplex": bool(used) and _text(root / f"sys/class/net/{used}/duplex") == "half",
        "has_address_of": others[:_MOST],
        "loopback_name": not local and is_only_loopback(socket.gethostname()),
        "wrong_variables": [] if local else wrong_variables(environ, [*interfaces]),
    }


def wrong_variables(environ: Mapping[str, str], interfaces: list[str]) -> list[str]:
    """Return a statement about each variable that names no interface of this node.

    gloo takes full names, NCCL prefixes.

    Args:
        environ: the environment of the job.
        interfaces: the interfaces that are up, without loopback.
    """
    found = []
    gloo = environ.get("GLOO_SOCKET_IFNAME", "")
    if [one for one in gloo.split(",") if one and one not in interfaces]:
        found.append(f"GLOO_SOCKET_IFNAME={gloo}")
    nccl = environ.get("NCCL_SOCKET_IFNAME", "")
    if nccl and not chosen_interfaces(nccl, interfaces):
        found.append(f"NCCL_SOCKET_IFNAME={nccl}")
    has = ", ".join(interfaces[:_MOST]) or "no interface but loopback"
    return [f"{one} names no interface there that is up; the node has {has}" for one in found]


def _host(root: Path) -> str:
    """Return a text that two names of one machine have in common: its boot and its network namespace."""
    try:
        namespace = str((root / "proc/self/ns/net").stat().st_ino)
    except OSError:
        namespace = ""
    return f"{_text(root / 'proc/sys/kernel/random/boot_id')[:8]} {namespace}"


def _speed(root: Path, interface: str | None) -> int | None:
    """Return the speed of an interface in Mbit/s; None if its driver does not report it."""
    text = _text(root / f"sys/class/net/{interface}/speed") if interface else ""
    return int(text) if text.isdecimal() and int(text) > 0 else None


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        # The speed of a link that is down cannot be read.
        return ""
