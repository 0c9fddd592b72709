"""Differences between the nodes of a job that matter to NCCL."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpcrun.network.nccl.machine.facts import NodeFacts


@dataclass(frozen=True)
class Difference:
    """A property with its values, and the hosts of each value, the most frequent value first."""

    what: str
    hosts: Mapping[str, tuple[str, ...]]

    def __str__(self) -> str:
        parts = [f"{value} on {', '.join(hosts)}" for value, hosts in self.hosts.items()]
        return f"{self.what}: {'; '.join(parts)}"


def differences(nodes: Sequence[NodeFacts]) -> list[Difference]:
    """Return the properties in which the nodes differ, without the addresses, which always differ."""
    described = {node.host: _described(node) for node in nodes}
    found = []
    for what in next(iter(described.values()), {}):
        hosts: dict[str, list[str]] = defaultdict(list)
        for host, properties in described.items():
            hosts[properties[what]].append(host)
        if len(hosts) > 1:
            ordered = sorted(hosts.items(), key=lambda item: -len(item[1]))
            found.append(Difference(what, {value: tuple(names) for value, names in ordered}))
    return found


def _described(node: NodeFacts) -> dict[str, str]:
    used = next((one for one in node.interfaces if one.name == node.route), None)
    up = [one.name for one in node.interfaces if one.up and one.addresses and one.name != "lo"]
    ports = [
        f"{port.device} {port.layer} {port.rate}" + ("" if port.active else " (not active)")
        for port in node.rdma
    ]
    return {
        "interfaces": _list(sorted(up)),
        "interface to the others": str(node.route or "none"),
        "MTU": str(used.mtu if used else None),
        "link speed": str(used.speed if used else None),
        "RDMA ports": _list(ports),
        "Slingshot devices": str(node.cxi),
        "network plugins": _list(node.plugins),
        "GPUs": _list(_counted(node.gpus)),
        "GPU links": _list(node.links),
        "ulimit -l": "unlimited" if node.memlock == -1 else str(node.memlock),
        "GPUDirect module": str(node.peermem),
        "host name is loopback": str(node.loopback_name),
        "NCCL": str(node.nccl),
        "torch": str(node.torch),
    }


def _counted(names: Sequence[str]) -> list[str]:
    return [f"{names.count(name)} x {name}" for name in dict.fromkeys(names)]


def _list(values: Sequence[Any]) -> str:
    return ", ".join(map(str, values)) or "none"
