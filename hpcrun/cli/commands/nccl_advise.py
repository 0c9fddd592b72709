"""`hpcrun nccl advise`: recommended variables for this node, or for every node of an allocation."""

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpcrun.cli.output import print_json
from hpcrun.errors import NetworkError, UserError
from hpcrun.network.agents import on_slurm, start
from hpcrun.network.nccl.advise import (
    Advice,
    Difference,
    advise,
    as_data,
    as_shell,
    as_table,
    as_yaml,
    differences,
)
from hpcrun.network.nccl.machine import NodeFacts, facts_from, inspect_node
from hpcrun.network.nccl.rules import is_version
from hpcrun.printing import say, say_aside
from hpcrun.ranks.launchers import step_hosts

_TEXTS = {"table": as_table, "shell": as_shell, "yaml": as_yaml}
# Seconds for a step on all nodes: nvidia-smi takes several seconds on a busy node.
_PATIENCE = 180.0


def run(arguments: argparse.Namespace) -> int:
    """Print the advice; with ``--record``, the facts on which it is based."""
    if arguments.target is not None:
        raise UserError(f"nccl advise {arguments.target}: advise takes no file; see --facts")
    if arguments.nccl is not None and not is_version(arguments.nccl):
        raise UserError(f"--nccl {arguments.nccl}: should be a version such as 2.27.5")
    nodes = _nodes(arguments)
    if arguments.record:
        print_json(nodes[0].as_record())
        return 0
    found = differences(nodes)
    advice = {node.host: advise(node, arguments.nccl) for node in nodes}
    if arguments.json or arguments.format == "json":
        print_json(_data(advice, found))
        return 0
    _print(advice, found, arguments.format)
    return 0


def _nodes(arguments: argparse.Namespace) -> list[NodeFacts]:
    """Return the recorded node, this node, or every node of an allocation."""
    if arguments.facts is not None:
        return [_recorded(Path(arguments.facts))]
    hosts = step_hosts(os.environ)
    if len(hosts) > 1 and not arguments.record and "SLURM_JOB_ID" in os.environ:
        return _on_every_node(hosts)
    return [inspect_node(os.environ, hosts)]


def _recorded(path: Path) -> NodeFacts:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(record, dict):
        raise UserError(f"{path}: should contain one JSON object, as --record prints it")
    try:
        return facts_from(record)
    except NetworkError as error:
        raise UserError(f"{path}: {error}") from error


def _on_every_node(hosts: Sequence[str]) -> list[NodeFacts]:
    """Inspect every node of the allocation."""
    nodes = start(on_slurm(), hosts, _PATIENCE)
    try:
        found = nodes.ask("inspect", _PATIENCE, peers=list(hosts))
    finally:
        nodes.close()
    if not found:
        words = " ".join(nodes.words().split())[:300] or "no node answered"
        raise UserError(f"srun on {len(hosts)} nodes: {words}")
    if len(found) < len(hosts):
        say_aside(f"hpcrun: {len(hosts) - len(found)} of {len(hosts)} nodes did not answer")
    return [facts_from(record) for record in found.values()]


def _data(advice: dict[str, list[Advice]], found: list[Difference]) -> dict[str, Any]:
    return {
        "nodes": {host: as_data(lines) for host, lines in advice.items()},
        "differences": [{"what": one.what, "hosts": one.hosts} for one in found],
    }


def _print(advice: dict[str, list[Advice]], found: list[Difference], form: str) -> None:
    """Print equal advice once; the node names go to standard error, so that they do not mix with exports."""
    groups: dict[tuple[Advice, ...], list[str]] = {}
    for host, lines in advice.items():
        groups.setdefault(tuple(lines), []).append(host)
    for number, (group, hosts) in enumerate(groups.items()):
        if len(advice) > 1:
            say(f"{'# ' if form != 'table' else ''}{', '.join(hosts)}:")
        say(*_TEXTS[form](group).split("\n")[: -1 if number == len(groups) - 1 else None])
    for difference in found:
        say_aside(f"hpcrun: the nodes differ in {difference}")
    _print_what_is_set({line for group in groups for line in group})


def _print_what_is_set(lines: set[Advice]) -> None:
    """Name the advised variables that this shell sets to other values."""
    for line in sorted(lines, key=lambda line: line.name or ""):
        if line.name is not None and os.environ.get(line.name, line.value) != line.value:
            say_aside(
                f"hpcrun: this shell has {line.name}={os.environ[line.name]}, not {line.value}"
            )
