"""The ports on which rank 0 listens: which are tried, the coordinator of the trial, and its findings.

Rank 0 listens on MASTER_PORT, or on a port below the kernel's ephemeral range. NCCL and gloo listen on
ephemeral ports. A firewall often closes the ports of one kind only.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from hpcrun.network.agents import Nodes
from hpcrun.network.links import TRIES, TRY
from hpcrun.network.measurements import PortCheck
from hpcrun.network.probes import Finding
from hpcrun.ranks.addresses import FIRST_PORT, ephemeral_range, wanted_ports

_READY, _GRACE = 30.0, 10.0
_OF_RANK_0, _MOST_TARGETS = 6, 3
_OF_TORCHRUN = 29500
# Nodes that connect at the same time: more would fill the backlog of the target.
_AT_ONCE = 128


def tried_ports(environ: Mapping[str, str], key: str) -> list[int]:
    """Return the ports to try, in order: MASTER_PORT if it is set, else a sample of hpcrun's range.

    The sample has both ends of the range, so that a closed range is seen as a whole, and torchrun's port.

    Args:
        key: any text; another key gives another sample.
    """
    given = environ.get("MASTER_PORT", "")
    if given.isdecimal() and 0 < int(given) < 1 << 16:
        return [int(given)]
    low, _ = ephemeral_range()
    ends = [FIRST_PORT, low - 1, _OF_TORCHRUN] if low > _OF_TORCHRUN else []
    return sorted({*wanted_ports({}, key)[:_OF_RANK_0], *ends})


def check_ports(nodes: Nodes, ports: Sequence[int]) -> list[PortCheck]:
    """Let every node connect to ``ports`` of the first node, where rank 0 of a job runs.

    If most nodes fail, up to two other nodes are tried in the place of the first: a fault of one node, or of
    the network.
    """
    checks: list[PortCheck] = []
    for target in list(nodes.live[:_MOST_TARGETS]):
        held = nodes.ask("hold", _READY, [target], ports=ports).get(target)
        if not held:
            continue
        others = [name for name in nodes.live if name != target]
        seen = []
        for first in range(0, len(others), _AT_ONCE):
            some, seconds = others[first : first + _AT_ONCE], TRIES * TRY + _GRACE
            found = nodes.ask("reach", seconds, some, lose=False, target=target, ports=held)
            seen += [PortCheck(name, target, tuple(held), **one) for name, one in found.items()]
        nodes.ask("release", _READY, [target])
        checks += seen
        if not _most_fail(seen):
            break
    return checks


def port_findings(checks: Sequence[PortCheck]) -> list[Finding]:
    """Return a finding for each node that closes ports of rank 0's range, or cannot connect to them.

    If most nodes do not reach a node, that node is at fault. If that is true for each of several nodes, all
    nodes are.
    """
    by_target: dict[str, list[PortCheck]] = defaultdict(list)
    for check in checks:
        by_target[check.target].append(check)
    closed = {target: seen for target, seen in by_target.items() if _most_fail(seen)}
    if len(closed) > 1 and len(closed) == len(by_target):
        every = [one for seen in closed.values() for one in seen]
        return [_finding((), f"between them, {_closing(every)}")]
    found = [_finding((target,), _closing(seen)) for target, seen in closed.items()]
    for check in checks:
        if check.failed and check.target not in closed:
            words = f"cannot connect to {_listed([check])} of {check.target}"
            found.append(_finding((check.node,), words))
    return found


_REMEDY = "rank 0 of a job listens there: open them (iptables, nftables), or set MASTER_PORT to an open port"


def _finding(nodes: tuple[str, ...], words: str) -> Finding:
    return Finding("closed port", nodes, "fail", words, _REMEDY)


def _most_fail(checks: Collection[PortCheck]) -> bool:
    return sum(bool(one.failed) for one in checks) * 2 > len(checks)


def _closing(checks: Sequence[PortCheck]) -> str:
    refused = sum(len(one.refused) for one in checks)
    verb = "refused" if refused * 2 > sum(len(one.failed) for one in checks) else "dropped"
    return f"connections to {_listed(checks)} are {verb}"


def _listed(checks: Sequence[PortCheck]) -> str:
    """Return the closed ports; a row of ports without an open port between them as a range."""
    tried = sorted({port for one in checks for port in one.tried})
    failed = {port for one in checks for port in one.failed}
    rows: list[tuple[int, int]] = []
    before = False
    for port in tried:
        if port in failed:
            rows.append((rows.pop()[0] if before else port, port))
        before = port in failed
    parts = [f"{first} to {last}" if last > first else str(first) for first, last in rows]
    word = "ports" if len(failed) > 1 else "port"
    return f"{word} {', '.join(parts)} ({len(failed)} of {len(tried)} tried)"
