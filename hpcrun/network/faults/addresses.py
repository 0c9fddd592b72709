"""Faults of the nodes' addresses, names and interfaces, as the nodes themselves report them."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from hpcrun.network.measurements import NameCheck, NodeNetwork
from hpcrun.network.probes import Finding


def address_findings(networks: Mapping[str, NodeNetwork]) -> list[Finding]:
    """Return a finding for each pair of nodes with one address: the other nodes reach either of the two.

    Two names of one machine have one address, and get no finding.
    """
    found: dict[tuple[str, str], Finding] = {}
    for node, network in networks.items():
        for other in network.has_address_of:
            if other in networks and networks[other].host != network.host:
                pair = (min(node, other), max(node, other))
                words = f"both have the address of {other}, so connections reach the wrong node"
                remedy = f"remove the address from {node} (ip address), or give it another one"
                found[pair] = Finding("address", pair, "fail", words, remedy)
    return [*found.values()]


def own_findings(networks: Mapping[str, NodeNetwork]) -> list[Finding]:
    """Return the findings about variables, the own name and the duplex mode of each node.

    On hosts of Debian and Ubuntu, the own name often is loopback on every node, and sites live with this.
    Only a node that differs from most gets a finding.
    """
    found = []
    by_words: dict[str, list[str]] = defaultdict(list)
    for node, network in networks.items():
        for words in network.wrong_variables:
            by_words[words].append(node)
        if network.half_duplex:
            remedy = "set autonegotiation at both ends of its cable, or replace the cable"
            words = f"{network.interface} is half-duplex"
            found.append(Finding("duplex", (node,), "fail", words, remedy))
    remedy = "correct the variable; NCCL and gloo fail with it"
    for words, nodes in by_words.items():
        places = [()] if len(nodes) == len(networks) else [(node,) for node in nodes]
        found += [Finding("interface", place, "fail", words, remedy) for place in places]
    looped = [node for node, network in networks.items() if network.loopback_name]
    if len(looped) * 2 < len(networks):
        words = "there, its own name resolves only to loopback"
        remedy = "correct its /etc/hosts; gloo and programs that bind to the host name fail"
        found += [Finding("name", (node,), "fail", words, remedy) for node in looped]
    return found


def name_findings(checks: Sequence[NameCheck], count: int) -> list[Finding]:
    """Return findings about names. If most nodes see a name wrong, the named node is at fault.

    Args:
        checks: one for each pair and direction.
        count: of the nodes.
    """
    bad = [check for check in checks if check.problem in ("wrong", "unresolved")]
    by_target, by_resolver = defaultdict(list), defaultdict(list)
    for check in bad:
        by_target[check.target].append(check)
    wrong = {node: seen for node, seen in by_target.items() if len(seen) > max(1, (count - 1) // 2)}
    found = []
    for target, seen in wrong.items():
        words = f"its name {_seen_as(seen[0])} on {len(seen)} nodes"
        found.append(Finding("name", (target,), "fail", words, "correct the name service"))
    for check in bad:
        if check.target not in wrong:
            by_resolver[check.resolver].append(check)
    for resolver, seen in by_resolver.items():
        names = ", ".join(sorted(check.target for check in seen))
        words = f"there, the name {names} {_seen_as(seen[0])}"
        remedy = "correct its /etc/hosts or resolver"
        found.append(Finding("name", (resolver,), "fail", words, remedy))
    return found


def _seen_as(check: NameCheck) -> str:
    if check.problem == "unresolved":
        return "does not resolve"
    return f"resolves to {check.address}, which is not that node"
