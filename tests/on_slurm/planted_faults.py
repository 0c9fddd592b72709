"""Network faults at random places of the dev cluster, and the findings that name them."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from .cluster import SlurmCluster
from .scripts import SBATCH

Finding = tuple[str, list[str]]
"""Check and nodes."""
SALLOC = ("salloc", "--nodes=4", "--ntasks-per-node=1", "--no-kill")


def environment(slurm: SlurmCluster) -> dict[str, str]:
    """Return the variables of an activated virtual environment, with the checkout under test first."""
    path = f"{Path(slurm.python).parent}:/usr/local/bin:/usr/bin:/bin"
    return {"PATH": path, "PYTHONPATH": str(SBATCH.parent)}


def check(slurm: SlurmCluster, *options: str) -> dict[str, Any]:
    """Return the report of a check over all nodes, started on the login host."""
    words = [*SALLOC, slurm.python, "-m", "hpcrun", "netcheck", "--json", *options]
    words[1] = f"--nodes={len(slurm.nodes)}"
    done = slurm.run(words, env=environment(slurm), check=False)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == bool(report["findings"])
    return report


def named(report: dict[str, Any]) -> list[Finding]:
    """Return check and nodes of each finding."""
    return [(finding["check"], finding["nodes"]) for finding in report["findings"]]


def addresses(slurm: SlurmCluster) -> dict[str, str]:
    """Return the address of each host, from the cluster's hosts file."""
    text = slurm.run(["cat", "/etc/hosts"]).stdout
    lines = [line.split() for line in text.splitlines() if line.split()]
    return {name: words[0] for words in lines for name in words[1:]}


@contextlib.contextmanager
def rules(slurm: SlurmCluster, node: str, hook: str, rule: str) -> Iterator[None]:
    """Add a rule to the packet filter of ``node``."""
    table = f"table inet planted {{ chain it {{ type filter hook {hook} priority 0; {rule}; }}; }}"
    slurm.run(["nft", "-f", "-"], host=node, user="root", stdin=table)
    try:
        yield
    finally:
        slurm.run(["nft", "delete", "table", "inet", "planted"], host=node, user="root")


@contextlib.contextmanager
def wrong_entry(slurm: SlurmCluster, node: str, other: str) -> Iterator[None]:
    """Give ``node`` a hosts file with the address of the login host for ``other``."""
    text = slurm.run(["cat", "/etc/hosts"], host=node).stdout
    login = addresses(slurm)["login"]
    lines = [line.split() for line in text.splitlines() if line.split()]
    wrong = slurm.shared / f"hosts-of-{node}"
    wrong.write_text(
        "".join(
            f"{login if other in words else words[0]} {' '.join(words[1:])}\n" for words in lines
        )
    )
    slurm.run(["mount", "--bind", str(wrong), "/etc/hosts"], host=node, user="root")
    try:
        yield
    finally:
        slurm.run(["umount", "/etc/hosts"], host=node, user="root")


@contextlib.contextmanager
def faulty(slurm: SlurmCluster, node: str, fault: Callable[[], None]) -> Iterator[None]:
    """Inject a fault into the link of ``node``."""
    fault()
    try:
        yield
    finally:
        slurm.restore_link(node)


FAULTS = ("none", "slow-link", "lossy-link", "slow-node", "lossy-node", "wrong-name", "refuses")


@contextlib.contextmanager
def planted(
    slurm: SlurmCluster, fault: str, dice: random.Random
) -> Iterator[Callable[[dict[str, Any]], bool]]:
    """Inject a fault at a random place; yield a function that is true for a report of exactly this fault."""
    node, other = dice.sample(slurm.nodes, 2)
    pair = sorted((node, other))
    to_other = f"ip daddr {addresses(slurm)[other]}"
    with contextlib.ExitStack() as stack:
        expected: Sequence[Finding] = []
        if fault == "slow-link":
            rule = f"{to_other} limit rate over 6 mbytes/second burst 256 kbytes drop"
            stack.enter_context(rules(slurm, node, "output", rule))
            expected = [("link", pair)]
        elif fault == "lossy-link":
            rule = f"{to_other} numgen random mod 100 < 20 drop"
            stack.enter_context(rules(slurm, node, "output", rule))
            expected = [("link", pair)]
        elif fault == "slow-node":
            stack.enter_context(faulty(slurm, node, lambda: slurm.slow_link(node, "50mbit")))
            expected = [("slow", [node])]
        elif fault == "lossy-node":
            stack.enter_context(faulty(slurm, node, lambda: slurm.lossy_link(node, 20)))
            # Slurm's packets are lost too, so the node's answers may come too late.
            yield lambda report: {tuple(nodes) for _, nodes in named(report)} == {(node,)}
            return
        elif fault == "wrong-name":
            stack.enter_context(wrong_entry(slurm, node, other))
            expected = [("name", [node])]
        elif fault == "refuses":
            # slurmd's port stays open.
            rule = "iifname eth0 tcp flags & (syn | ack) == syn tcp dport != 6818 reject with tcp reset"
            stack.enter_context(rules(slurm, node, "input", rule))
            expected = [("refuses", [node])]
        yield lambda report: named(report) == expected
