"""The findings about ports: the closed ranges, and the node that closes them."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from hpcrun.network.check.measurements import PortCheck


class PortFault(NamedTuple):
    """Nodes at fault, and the fault. No node means all nodes. ``partial``: other ports are open."""

    nodes: tuple[str, ...]
    text: str
    partial: bool


_REMEDY = (
    "open them between the nodes (iptables, nftables), or set MASTER_PORT for rank 0 and "
    "net.ipv4.ip_local_port_range for NCCL and gloo to ports that are open"
)


def ranges(tried: Sequence[int], failed: Collection[int]) -> list[tuple[int, int]]:
    """Return first and last port of each run of ``tried`` ports without an open port between them."""
    found: list[tuple[int, int]] = []
    before = False
    for port in sorted(tried):
        now = port in failed
        if now:
            found.append((found.pop()[0] if before else port, port))
        before = now
    return found


def port_faults(checks: Iterable[PortCheck], bad: Collection[frozenset[str]]) -> list[PortFault]:
    """Return the nodes that close ports.

    If most nodes do not reach the ports of a node, this node is at fault, otherwise the connecting node. If
    every node is at fault, the network is at fault.

    Args:
        checks: the connections of the nodes.
        bad: nodes and links with a finding. Lost packets there look like closed ports.
    """
    counted = [one for one in checks if not any(known <= {one.node, one.target} for known in bad)]
    by_target = defaultdict(list)
    for check in counted:
        by_target[check.target].append(check)
    closed = {
        target: [one for one in seen if one.failed]
        for target, seen in by_target.items()
        if sum(bool(one.failed) for one in seen) * 2 > len(seen)
    }
    if len(closed) > 1 and len(closed) == len(by_target):
        every = [one for seen in closed.values() for one in seen]
        return [PortFault((), f"{_closing(every)}; {_REMEDY}", _partial(every))]
    found = [
        PortFault((target,), f"{_closing(seen)}; {_REMEDY}", _partial(seen))
        for target, seen in closed.items()
    ]
    by_node = defaultdict(list)
    for check in counted:
        if check.failed and check.target not in closed:
            by_node[check.node].append(check)
    for node, seen in by_node.items():
        targets = ", ".join(check.target for check in seen)
        text = f"cannot connect to {_listed(seen)} of {targets}; {_REMEDY}"
        found.append(PortFault((node,), text, _partial(seen)))
    return found


def _partial(seen: Sequence[PortCheck]) -> bool:
    return any(len(check.failed) < len(check.tried) for check in seen)


def _closing(seen: Sequence[PortCheck]) -> str:
    refused = sum(len(check.refused) for check in seen)
    verb = "refuses" if refused * 2 > sum(len(check.failed) for check in seen) else "drops"
    return f"{verb} connections of other nodes to {_listed(seen)}"


def _listed(seen: Sequence[PortCheck]) -> str:
    tried = {port for check in seen for port in check.tried}
    failed = {port for check in seen for port in check.failed}
    parts = [
        f"{first} to {last}" if last > first else str(first)
        for first, last in ranges(sorted(tried), failed)
    ]
    word = "ports" if len(failed) > 1 else "port"
    return f"{word} {', '.join(parts)} ({len(failed)} of {len(tried)} tried)"
