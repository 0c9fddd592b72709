"""Reports about a cluster, for people and programs."""

from __future__ import annotations

import json
import sys
from typing import Any

from . import daemons, registry, slurmconf
from .cluster import Cluster, node_states, stored_spec
from .layout import Layout


def after_up(cluster: Cluster, started: list[str], seconds: float) -> str:
    """Return the report of `up`: the new parts, and the three next commands."""
    spec, layout = cluster.spec, cluster.layout
    tool = sys.argv[0]
    name = "" if spec.name == "dev" else f" --name {spec.name}"
    names = [partition.name for partition in slurmconf.partitions(spec)]
    if not started:
        news = "was up already"
    elif started == daemons.names(spec):
        news = f"is up ({seconds:.1f} s)"
    else:
        news = f"was up; started again: {', '.join(started)}"
    version = f"Slurm {spec.slurm}, " if spec.slurm else ""
    gpus = ",".join(str(count) for count in spec.gpus)
    return "\n".join(
        [
            f"cluster {spec.name} {news}",
            f"  {version}{spec.nodes} nodes ({spec.node_names[0]} to {spec.node_names[-1]}), "
            f"{gpus} GPUs and {spec.cpus} CPUs each (simulated); login host `login`",
            f"  partitions {', '.join(names)} (the first is the default)",
            f"  jobs run as {spec.user}, shared directory {layout.shared} ({spec.shared_fs})",
            f"  logs in {layout.log}",
            "next:",
            f"  {tool} exec{name} login -- srun -N{spec.nodes} hostname",
            f"  {tool} shell{name}",
            f"  {tool} down{name}",
        ]
    )


def gather(cluster: Cluster) -> dict[str, Any]:
    """Return the state of every part, as plain values."""
    spec, layout = cluster.spec, cluster.layout
    states = node_states(cluster) if daemons.recorded(layout, "holder-ctl") else {}
    return {
        "name": spec.name,
        "root": str(layout.root),
        "shared": str(layout.shared),
        "slurm_conf": str(layout.slurm_conf),
        "user": spec.user,
        "slurm": spec.slurm,
        "complete": layout.ready.exists(),
        "hosts": {
            host: {
                "address": layout.address(host),
                "up": daemons.recorded(layout, f"holder-{host}") is not None,
                "slurm": states.get(host),
            }
            for host in spec.host_names
        },
        "daemons": {
            daemon: daemons.recorded(layout, daemon) is not None for daemon in daemons.names(spec)
        },
    }


def as_json(state: dict[str, Any]) -> str:
    """Return the report for programs."""
    return json.dumps(state, indent=1)


def as_text(state: dict[str, Any]) -> str:
    """Return the report for people: one line per host, then the problems."""
    lines = [f"cluster {state['name']} in {state['root']}, jobs run as {state['user']}"]
    for name, host in state["hosts"].items():
        alive = "up" if host["up"] else "gone"
        lines.append(f"  {name:8} {host['address']:15} {alive:5} {host['slurm'] or ''}".rstrip())
    dead = [daemon for daemon, runs in state["daemons"].items() if not runs]
    if dead:
        lines.append(f"  not running: {', '.join(dead)}")
    if not state["complete"]:
        lines.append("  it was never completed; `devcluster up` or `down` removes the rest")
    return "\n".join(lines)


def all_clusters() -> str:
    """Return one line per registered cluster."""
    lines = []
    for entry in registry.entries():
        spec = stored_spec(Layout(entry.name, entry.root))
        size = f"{spec.nodes} nodes" if spec is not None else "half made"
        lines.append(
            f"{entry.name}  {size}  {entry.root}{'  abandoned' if entry.abandoned else ''}"
        )
    return "\n".join(lines) or "no cluster on this machine"
