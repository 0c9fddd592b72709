"""The cluster: its configuration, its partitions, and its nodes in several states."""

from __future__ import annotations

from pathlib import Path

from hpcrun import slurm as programs

from .site import Site

GRES = ["sinfo", "--noheader", "--Node", "--format=%P|%N|%T|%c|%m|%G"]


def record(site: Site) -> None:
    """Record sinfo with untyped and typed GPUs; afterwards node1 has typed GPUs."""
    site.keep("show-config.txt", ["scontrol", "show", "config"])
    site.keep("show-partition.txt", ["scontrol", "show", "partition"])
    site.keep("sbatch.txt", ["sbatch", "--parsable", "--output=/dev/null", "--wrap", "true"])
    site.slurm.wait_until(lambda: not site.slurm.admin("squeue", "--noheader").strip())
    wanted = {"node1": "mixed", "node2": "allocated", "node3": "drained", "node4": "down"}
    nap = ("--output=/dev/null", "--wrap", "sleep 300")
    site.slurm.sbatch("--nodelist=node1", *nap)
    site.slurm.sbatch("--nodelist=node2", "--exclusive", *nap)
    for node, state in (("node3", "drain"), ("node4", "down")):
        site.slurm.admin("scontrol", "update", f"nodename={node}", f"state={state}", "reason=test")

    def states() -> dict[str, str]:
        return programs.parse_sinfo(site.ask(programs.sinfo_command()).stdout)

    site.until(lambda: wanted.items() <= states().items(), "nodes in every state")
    site.keep("sinfo.txt", programs.sinfo_command())
    site.keep("sinfo-gres.txt", GRES)
    site.slurm.heal()
    typed(site)
    site.keep("sinfo-typed-gres.txt", GRES)


def typed(site: Site) -> None:
    """Give the GPUs of node1 a type: edit the files and restart the daemons."""
    layout = site.slurm.handle.layout
    edit(layout.slurm_conf, "NodeName=node1 ", "Gres=gpu:", "Gres=gpu:a100:")
    edit(
        layout.slurm_conf.parent / "gres.conf", "NodeName=node1 ", "Name=gpu", "Name=gpu Type=a100"
    )
    restart(site, "node1")
    site.until(lambda: "gpu:a100:4" in site.ask(GRES).stdout, "a type of GPU")
    site.slurm.heal()


def restart(site: Site, node: str) -> None:
    """Restart the controller and the daemon of a node, so that they read their files."""
    site.slurm.stop_daemon("slurmctld")
    site.slurm.start_daemon("slurmctld")
    site.slurm.orphan_node(node)
    site.slurm.revive_node(node)


def edit(path: Path, start: str, old: str, new: str) -> None:
    """Replace words in the lines of a file that begin with ``start``."""
    lines = path.read_text().splitlines(keepends=True)
    changed = [line.replace(old, new) if line.startswith(start) else line for line in lines]
    path.write_text("".join(changed))
