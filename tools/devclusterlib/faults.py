"""Fault injection: power loss, dead daemons, and cut, slow or lossy links.

Faults of a link act at both ends of the host's wire: its port on the switch for received packets,
and its own interface for sent packets.
"""

from __future__ import annotations

import re
import signal

from . import daemons, sharedfs, startup
from .cluster import Cluster
from .commands import attempt, run
from .errors import CommandFailed, Refusal
from .hosts import namespace_ids
from .layout import SWITCH, Layout
from .processes import command_name, empty, end, processes_in

SLURM_PROCESSES = ("slurmd", "slurmstepd")
STOPPABLE = (
    *("slurmctld", "slurmdbd", "mariadbd", "munged"),
    *(server for kind in sharedfs.KINDS.values() for server in kind.ports),
)
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


def wire_ends(layout: Layout, host: str) -> list[tuple[str, str]]:
    """Return namespace and interface of both ends of the host's wire."""
    return [(layout.netns(SWITCH), host), (layout.netns(host), "eth0")]


def require_host(cluster: Cluster, host: str) -> None:
    """Refuse a name that is no host of the cluster."""
    if host not in cluster.spec.host_names:
        raise Refusal(
            f"cluster {cluster.spec.name} has no host {host}",
            f"it has {', '.join(cluster.spec.host_names)}",
        )


def require_node(cluster: Cluster, node: str) -> None:
    """Refuse a name that is no compute node."""
    if node not in cluster.spec.node_names:
        raise Refusal(
            f"cluster {cluster.spec.name} has no node {node}",
            f"it has {', '.join(cluster.spec.node_names)}",
        )


def pids_on(cluster: Cluster, host: str) -> list[int]:
    """Return the pids of all processes on ``host``, except the process that keeps its namespaces."""
    require_host(cluster, host)
    holder = daemons.recorded(cluster.layout, f"holder-{host}")
    inside = namespace_ids([cluster.layout.netns(host)])
    return [item.pid for item in processes_in(inside) if item != holder]


def lose_power(cluster: Cluster, node: str) -> None:
    """Kill all processes of the node together, Slurm's daemons first.

    If a task died before its slurmstepd, slurmstepd would report a failed task, and the job
    would end FAILED instead of NODE_FAIL. The loopback interface is down meanwhile: an srun of the node
    would notice the end of a slurmstepd there and kill its step on all other nodes, before srun itself ends.
    """
    require_node(cluster, node)
    holder = daemons.recorded(cluster.layout, f"holder-{node}")
    netns = cluster.layout.netns(node)
    run(link_argv(netns, "lo", "down"))
    try:
        leave_orphans(cluster, node)
        empty(namespace_ids([netns]), spare=holder)
    finally:
        run(link_argv(netns, "lo", "up"))


def leave_orphans(cluster: Cluster, node: str) -> None:
    """Kill slurmd and its step daemons only: the job's processes survive without supervision."""
    require_node(cluster, node)
    inside = namespace_ids([cluster.layout.netns(node)])
    slurm = [item for item in processes_in(inside) if command_name(item) in SLURM_PROCESSES]
    end(slurm, signal.SIGKILL, 5.0)


def revive(cluster: Cluster, node: str) -> None:
    """Start the node's slurmd again and wait until Slurm has the node back; other nodes do not change."""
    require_node(cluster, node)
    belongings = [name for name in daemons.names(cluster.spec) if daemons.host_of(name) == node]
    for name in belongings:
        startup.start(cluster, [name])


def stop_daemon(cluster: Cluster, daemon: str) -> None:
    """Stop one of the central daemons as its service manager would."""
    require_daemon(cluster, daemon)
    daemons.stop(cluster.layout, daemon)


def start_daemon(cluster: Cluster, daemon: str) -> None:
    """Start a stopped central daemon and wait until it answers."""
    require_daemon(cluster, daemon)
    startup.start(cluster, [daemon])


def require_daemon(cluster: Cluster, daemon: str) -> None:
    """Refuse a daemon that the cluster does not have."""
    have = [item for item in daemons.names(cluster.spec) if item in STOPPABLE]
    if daemon not in have:
        raise Refusal(
            f"cluster {cluster.spec.name} has no daemon {daemon}", f"it has {', '.join(have)}"
        )


def link_argv(netns: str, interface: str, state: str) -> list[str]:
    """Return the command that sets an interface up or down."""
    return ["ip", "-n", netns, "link", "set", interface, state]


def rate_argv(netns: str, interface: str, rate: str) -> list[str]:
    """Return the command that limits the rate of sent packets on an interface."""
    return [
        *["tc", "-n", netns, "qdisc", "replace", "dev", interface, "root", "tbf"],
        *["rate", rate, "burst", str(burst_bytes(rate)), "latency", "200ms"],
    ]


def burst_bytes(rate: str) -> int:
    """Return the size of the token bucket: 10 ms of traffic; less would be limited by the timer's tick."""
    match = re.fullmatch(r"(\d+)(kbit|mbit|gbit)", rate)
    if match is None:
        raise Refusal(f"--rate {rate!r} is not a rate", "write it like 50mbit")
    return max(65536, int(float(match[1]) * UNITS[match[2]] / 8 / 100))


def unlimited_argv(netns: str, interface: str) -> list[str]:
    """Return the command that removes the limit; it fails if there is none."""
    return ["tc", "-n", netns, "qdisc", "del", "dev", interface, "root"]


def in_namespace_argv(layout: Layout, host: str, command: list[str]) -> list[str]:
    """Return the command for a program without an option for namespaces."""
    return ["nsenter", f"--net={layout.netns_path(host)}", "--", *command]


def loss_rules(host: str, interface: str, percent: int) -> str:
    """Return nftables rules that drop ``percent`` of the packets that arrive on ``interface``.

    The switch has ports of many hosts, so the table carries the host's name.
    """
    return no_loss_rules(host) + (
        f"table netdev loss_{host} {{\n"
        f'  chain ingress {{ type filter hook ingress device "{interface}" priority 0;\n'
        f"    numgen random mod 100 < {percent} drop\n"
        "  }\n"
        "}\n"
    )


def no_loss_rules(host: str) -> str:
    """Return nftables rules that end the loss.

    Only an existing table can be deleted, so the rules create the table first.
    """
    return f"table netdev loss_{host} {{}}\ndelete table netdev loss_{host}\n"


def cut_link(cluster: Cluster, host: str) -> None:
    """Cut the host's link: nothing is refused, packets are lost."""
    require_host(cluster, host)
    run(link_argv(cluster.layout.netns(SWITCH), host, "down"))


def slow_link(cluster: Cluster, host: str, rate: str) -> None:
    """Limit the host's bandwidth in both directions."""
    require_host(cluster, host)
    for netns, interface in wire_ends(cluster.layout, host):
        command = rate_argv(netns, interface, rate)
        try:
            run(command)
        except CommandFailed as error:
            raise Refusal(
                f"this kernel cannot limit a rate ({error.words})", "it needs sch_tbf"
            ) from error


def lossy_link(cluster: Cluster, host: str, percent: int) -> None:
    """Drop packets at random in both directions."""
    require_host(cluster, host)
    if not 1 <= percent <= 99:
        raise Refusal(f"--percent {percent}", "take 1 to 99; cut-link drops everything")
    for place, interface in ((SWITCH, host), (host, "eth0")):
        rules = loss_rules(host, interface, percent)
        try:
            run(in_namespace_argv(cluster.layout, place, ["nft", "-f", "-"]), stdin=rules)
        except CommandFailed as error:
            raise Refusal(
                f"this kernel cannot drop packets ({error.words})",
                "it needs nf_tables with the netdev ingress hook",
            ) from error


def restore_link(cluster: Cluster, host: str) -> None:
    """Undo all link faults of the host."""
    require_host(cluster, host)
    for netns, interface in wire_ends(cluster.layout, host):
        attempt(unlimited_argv(netns, interface))
    for place in (SWITCH, host):
        command = in_namespace_argv(cluster.layout, place, ["nft", "-f", "-"])
        attempt(command, stdin=no_loss_rules(host))
    run(link_argv(cluster.layout.netns(SWITCH), host, "up"))
