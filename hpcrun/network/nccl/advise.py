"""Advice for a node: the variables to set, and the faults to repair. Most nodes need no setting at all."""

import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hpcrun.network.nccl.machine import Interface, NodeFacts, RdmaPort
from hpcrun.network.nccl.rules import rules, version_key

# NCCL uses these only if there is no other interface, and prefers names that begin with ib.
_SKIPPED = ("lo", "docker")
# Bridges and tunnels of container engines and virtual machines, which NCCL takes for a network.
_INNER = ("virbr", "veth", "br-", "cni", "flannel", "cali", "podman", "vnet", "tun", "tap", "lxc")
_FAST = 100_000
_LITTLE_SHM = 1 << 30
_LL128_ON_CXI = (2, 27)


@dataclass(frozen=True)
class Advice:
    """A variable to set (``name`` and ``value``), or with ``name`` None a fault or a remark."""

    name: str | None
    value: str | None
    reason: str
    source: str

    def as_record(self) -> dict[str, str | None]:
        """Return the advice as one flat JSON object, the source as an address."""
        source = rules().sources.get(self.source, self.source)
        return {"name": self.name, "value": self.value, "reason": self.reason, "source": source}


def advise(facts: NodeFacts, nccl: str | None = None) -> list[Advice]:
    """Return the advice for a node: variables to set, then faults to repair.

    Args:
        facts: the node.
        nccl: the version of NCCL in the job; None: the version in ``facts``, or the newest known.
    """
    version = version_key(nccl or facts.nccl or rules().newest)
    if facts.cxi:
        lines = _slingshot(facts, version)
    elif _efa(facts):
        lines = _efa_lines(facts)
    elif any(port.active for port in facts.rdma):
        lines = _rdma_lines(facts)
    else:
        lines = _tcp_lines(facts)
    lines += _gloo_lines(facts, lines) + _node_remarks(facts)
    return sorted(lines, key=lambda line: line.name is None)


def _efa(facts: NodeFacts) -> list[RdmaPort]:
    return [port for port in facts.rdma if port.driver == "efa" or port.device.startswith("efa")]


def _efa_lines(facts: NodeFacts) -> list[Advice]:
    if facts.plugins:
        return []
    return [
        _remark(
            f"there are {len(_efa(facts))} EFA devices and no plugin: NCCL would use TCP. Install "
            "aws-ofi-nccl, or put its folder into LD_LIBRARY_PATH",
            "ofi",
        )
    ]


def _slingshot(facts: NodeFacts, version: tuple[int, ...]) -> list[Advice]:
    lines = [Advice("NCCL_SOCKET_IFNAME", "hsn", "the interfaces of Slingshot", "cscs")]
    if not facts.plugins:
        return [
            *lines,
            _remark(
                f"there are {facts.cxi} Slingshot devices and no plugin: NCCL would use TCP. Load the site's "
                "aws-ofi-nccl module",
                "cscs",
            ),
        ]
    lines += [
        Advice("NCCL_NET", "AWS Libfabric", "fail without the plugin, and do not use TCP", "cscs"),
        Advice("NCCL_NET_GDR_LEVEL", "PHB", "GPU and NIC share a NUMA node at most", "cscs"),
        Advice("NCCL_CROSS_NIC", "1", "Slingshot has no separate rails", "shs"),
        Advice("FI_CXI_DEFAULT_CQ_SIZE", "131072", "the default overflows in large jobs", "shs"),
        Advice("FI_CXI_DISABLE_HOST_REGISTER", "1", "registration by CUDA can deadlock", "shs"),
        Advice("FI_MR_CACHE_MONITOR", "userfaultfd", "the other monitors can hang NCCL", "shs"),
    ]
    if not facts.amd and version >= _LL128_ON_CXI:
        reason = "LL128 with GPUDirect corrupted data on Slingshot with NCCL 2.27 and newer"
        lines.append(Advice("NCCL_PROTO", "^LL128", reason, "ll128-cxi"))
    return lines


def _rdma_lines(facts: NodeFacts) -> list[Advice]:
    ports = _chosen_ports(facts)
    lines = _device_lines(facts, ports) + _socket_lines(facts)
    if facts.verbs is False:
        text = "/dev/infiniband cannot be opened, so NCCL uses TCP: give the container or the job its devices"
        lines.append(_remark(text, "env"))
    down = [one.device for one in facts.rdma if one.layer == ports[0].layer and not one.active]
    if down:
        text = f"{', '.join(down)}: {ports[0].layer} port down, which NCCL leaves out; look at its cable"
        lines.append(_remark(text, "env"))
    if facts.memlock is not None and facts.memlock != -1:
        lines.append(
            _remark(
                f"ulimit -l is {facts.memlock // 1024} KiB: RDMA cannot register its memory. The "
                "administrator sets LimitMEMLOCK=infinity for slurmd",
                "troubleshooting",
            )
        )
    if facts.gpus and not facts.amd and facts.peermem is False:
        lines.append(
            _remark(
                "nvidia_peermem is not loaded: without DMA-BUF (open driver, Linux 5.12) data goes through "
                "host memory; NCCL_DEBUG=INFO prints GDRDMA if it does not",
                "troubleshooting",
            )
        )
    return lines


def _chosen_ports(facts: NodeFacts) -> list[RdmaPort]:
    """Return the active ports of the largest group with one link layer and rate, or of the faster group."""
    active = [port for port in facts.rdma if port.active]
    groups = Counter((port.layer, port.rate) for port in active)
    best = max(groups, key=lambda group: (groups[group] * (group[1] or 0), group[1] or 0))
    return [port for port in active if (port.layer, port.rate) == best]


def _device_lines(facts: NodeFacts, ports: list[RdmaPort]) -> list[Advice]:
    others = [port for port in facts.rdma if port.active and port not in ports]
    if not others:
        return []
    names = ",".join(dict.fromkeys(port.device for port in ports))
    left = ", ".join(f"{port.device} ({port.layer}, {port.rate} Gbit/s)" for port in others)
    reason = f"NCCL takes every active device, but these belong to another network: {left}"
    return [Advice("NCCL_IB_HCA", f"={names}", reason, "env")]


def _tcp_lines(facts: NodeFacts) -> list[Advice]:
    lines = _socket_lines(facts)
    if facts.rdma:
        lines.append(_remark("no port of the RDMA devices is active; NCCL uses TCP", "env"))
    used = _used(facts)
    usable = [one for one in _taken_by_nccl(facts.interfaces) if not one.name.startswith(_INNER)]
    best = max(usable, key=lambda one: one.speed or 0, default=used)
    if used and best and used.speed and (best.speed or 0) >= 2 * used.speed:
        text = (
            f"the route, {used.name}, has {used.speed} Mbit/s, {best.name} has {best.speed}: if it "
        )
        text += f"connects the nodes, set NCCL_SOCKET_IFNAME=={best.name} and GLOO_SOCKET_IFNAME={best.name}"
        lines.append(_remark(text, "env"))
    if used is not None and (used.speed or 0) >= _FAST:
        gigabits = (used.speed or 0) // 1000
        reason = f"{used.name} has {gigabits} Gbit/s, more than one TCP stream fills"
        lines += [
            Advice("NCCL_SOCKET_NTHREADS", "4", reason, "env"),
            Advice(
                "NCCL_NSOCKS_PERTHREAD", "4", f"{reason}; without threads it does nothing", "env"
            ),
        ]
    return lines


def _socket_lines(facts: NodeFacts) -> list[Advice]:
    """Return advice if NCCL would not choose the interface that leads to the other nodes."""
    taken = _taken_by_nccl(facts.interfaces)
    if facts.route is None or not taken or taken[0].name == facts.route:
        return []
    first = taken[0]
    if first.name.startswith("ib") or not first.name.startswith(_INNER):
        return []
    reason = f"NCCL would take {first.name} first, which ends on this node; {facts.route} leads to the others"
    return [Advice("NCCL_SOCKET_IFNAME", f"={facts.route}", reason, "env")]


def _taken_by_nccl(interfaces: tuple[Interface, ...]) -> list[Interface]:
    """Return the interfaces in the order in which NCCL takes them without a setting."""
    usable = [one for one in interfaces if one.up and one.addresses]
    fabric = [one for one in usable if one.name.startswith("ib")]
    return fabric or [one for one in usable if not one.name.startswith(_SKIPPED)]


def _used(facts: NodeFacts) -> Interface | None:
    return next((one for one in facts.interfaces if one.name == facts.route), None)


def _gloo_lines(facts: NodeFacts, lines: list[Advice]) -> list[Advice]:
    chosen = [line.value or "" for line in lines if line.name == "NCCL_SOCKET_IFNAME"]
    if chosen:
        reason = "gloo does not read NCCL_SOCKET_IFNAME, and takes whole names only"
    elif facts.loopback_name:
        reason = f"{facts.host} resolves to loopback here, and gloo would use that address"
    else:
        return []
    prefix = chosen[0].removeprefix("=") if chosen else facts.route or "-"
    names = [one.name for one in facts.interfaces if one.name.startswith(prefix)][:1]
    return [Advice("GLOO_SOCKET_IFNAME", name, reason, "torch-distributed") for name in names]


def _node_remarks(facts: NodeFacts) -> list[Advice]:
    remarks = []
    if not facts.gpus:
        devices = "" if facts.rdma or facts.cxi else " and no RDMA device"
        remarks.append(
            _remark(
                f"no GPU{devices} is visible here, and NCCL needs GPUs: ask for advice on a GPU node, in the "
                "container of the job (srun)",
                "env",
            )
        )
    if facts.shm is not None and facts.shm < _LITTLE_SHM and len(facts.gpus) > 1:
        size = facts.shm // (1 << 20)
        remarks.append(
            _remark(
                f"/dev/shm has {size} MiB: NCCL needs more; start the container with --ipc=host",
                "troubleshooting",
            )
        )
    if facts.amd and facts.numa_balancing:
        remarks.append(
            _remark(
                "NUMA balancing is on and slows RCCL: sysctl kernel.numa_balancing=0", "rccl-tips"
            )
        )
    return remarks


def _remark(reason: str, source: str) -> Advice:
    return Advice(None, None, reason, source)


def as_shell(lines: Sequence[Advice]) -> str:
    """Return one quoted ``export`` per setting, with its reason in a comment; remarks are comments too."""
    text = []
    for line in lines:
        # A line break in a reason would end the comment.
        text.append(f"# {' '.join(line.reason.split())} [{line.as_record()['source']}]")
        if line.name is not None and line.value is not None:
            text.append(f"export {line.name}={shlex.quote(line.value)}")
    return "\n".join(text or ["# nothing to set: NCCL's own choices fit this node"])


def as_data(lines: Sequence[Advice]) -> dict[str, Any]:
    """Return the settings and the remarks as plain data."""
    records = [line.as_record() for line in lines]
    return {
        "set": [record for record in records if record["name"] is not None],
        "remarks": [record for record in records if record["name"] is None],
    }
