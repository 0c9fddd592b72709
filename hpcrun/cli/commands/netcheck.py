"""Check a job's network: names, latency, interfaces, ports, bandwidth, all-reduce.

Needs neither GPUs nor root. All pairs are measured in parallel rounds: 16
nodes take 45 seconds. The result names a bad node, a bad link, or a closed
range of ports.

  hpcrun netcheck              in an allocation (salloc, sbatch/netcheck.sbatch)
  hpcrun netcheck --nodes 8    requests 8 nodes from Slurm first
  hpcrun netcheck --local 4    four processes on this machine, to see a report

Exit code 1: a problem was found; the last line has the --exclude option to use.
"""

import argparse
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from hpcrun import slurm
from hpcrun.cli.arguments import add_local, require_local
from hpcrun.cli.output import print_json
from hpcrun.errors import UserError
from hpcrun.network.agents import here, on_slurm, start
from hpcrun.network.findings import findings
from hpcrun.network.links import tried_ports
from hpcrun.network.measurements import NetworkMeasurements
from hpcrun.network.netcheck import Check, Options
from hpcrun.network.probes import Finding
from hpcrun.network.rate_report import (
    as_data,
    collective_line,
    conclusion,
    node_lines,
    table,
    write_png,
)
from hpcrun.printing import escaped, say, show_table
from hpcrun.ranks.launchers import step_hosts
from hpcrun.slurm.nodes import parse_sinfo_gres, sinfo_gres_command

_WIDE_TABLE = 40
_ALL_REDUCE = 60.0
_OF_SALLOC = ("nodelist", "partition", "account", "qos", "reservation", "exclude", "time")
# Name, default, least value, help.
_MEASURE: Sequence[tuple[str, float, float, str]] = (
    ("seconds", Options.seconds, 0.1, "seconds per round"),
    ("streams", Options.streams, 1, "connections per pair"),
    ("threshold", Options.threshold, 0.01, "a rate below this share of the usual rate is slow"),
    ("patience", Options.patience, 1, "seconds for the nodes to start"),
    ("all-reduce", _ALL_REDUCE, 0, "timeout of the final all-reduce in seconds; 0: none"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    how = parser.add_argument_group("how to measure")
    for name, default, _, text in _MEASURE:
        words = f"{text} (default {default:g})"
        how.add_argument(f"--{name}", type=type(default), default=default, metavar="N", help=words)
    add_local(how, "N processes on this machine instead of nodes")
    where = parser.add_argument_group("which nodes (outside an allocation)")
    where.add_argument("--nodes", type=int, metavar="N", help="request N nodes from Slurm")
    for option in _OF_SALLOC:
        where.add_argument(f"--{option}", metavar="WORD", help=f"salloc's --{option}")
    what = parser.add_argument_group("what to print")
    what.add_argument("--json", action="store_true", help="print one JSON object")
    what.add_argument("--png", type=Path, metavar="FILE", help="draw the rates")


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; return 1 if something is wrong."""
    _require_sense(arguments)
    if arguments.local is None and "SLURM_JOB_ID" not in os.environ:
        return _in_an_allocation(arguments)
    measured = _measure(arguments, step_hosts(os.environ))
    found = findings(measured, arguments.threshold)
    if arguments.json:
        print_json(as_data(measured, found))
    else:
        _print(measured, found)
    if arguments.png is not None:
        bad = {node for one in found for node in one.nodes}
        write_png(arguments.png, measured.nodes, measured.transfers, bad)
    return int(bool(found))


def _require_sense(arguments: argparse.Namespace) -> None:
    for name, _, least, _ in _MEASURE:
        value = getattr(arguments, name.replace("-", "_"))
        if value < least:
            raise UserError(f"--{name} {value}: should be at least {least}")
    if arguments.threshold >= 1:
        raise UserError(f"--threshold {arguments.threshold}: should be between 0 and 1")
    require_local(arguments.local, 2)
    if arguments.nodes is not None and arguments.nodes < 2:
        raise UserError(f"--nodes {arguments.nodes}: a check of links needs at least 2")


def _measure(arguments: argparse.Namespace, hosts: Sequence[str]) -> NetworkMeasurements:
    local = arguments.local is not None
    names = [f"127.0.0.{index + 1}" for index in range(arguments.local)] if local else list(hosts)
    if len(names) < 2:
        raise UserError(
            f"this allocation has {len(names)} node: a check of links needs at least 2; request more with "
            "salloc --nodes, or leave the allocation and use --nodes"
        )
    # Processes on one machine cannot hold the same ports.
    ports = () if local else tuple(tried_ports(os.environ, os.environ["SLURM_JOB_ID"]))
    options = Options(
        seconds=arguments.seconds,
        streams=arguments.streams,
        ports=ports,
        all_reduce=arguments.all_reduce,
        threshold=arguments.threshold,
        patience=arguments.patience,
    )
    with tqdm(disable=None, unit="round", file=sys.stderr, leave=False) as bar:
        bar.set_description("starting")
        nodes = start(here if local else on_slurm(), names, options.patience)
        try:
            measured = Check(nodes, options, partial(_show, bar)).run()
        finally:
            nodes.close()
    if len(nodes.silent) == len(names):
        words = " ".join(nodes.words().split())[:300] or "no task answered"
        raise UserError(f"the check on {len(names)} nodes did not start: {words}")
    if measured.ended:
        states = slurm.parse_sinfo(slurm.run(slurm.sinfo_command(names)).stdout)
        down = [name for name in names if states.get(name, "").startswith("down")]
        measured.silent = dict.fromkeys(down, "Slurm has it as down") | measured.silent
    measured.nodes = names
    return measured


def _show(bar: "tqdm[Any]", step: int, steps: int, text: str) -> None:
    bar.total, bar.n = steps, step
    bar.set_description(escaped(text), refresh=False)
    bar.refresh()


def _print(measured: NetworkMeasurements, found: list[Finding]) -> None:
    say(*node_lines(measured))
    if len(measured.nodes) <= _WIDE_TABLE and measured.transfers:
        say("", "Gbit/s, from row to column")
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 400
        show_table(table(measured.nodes, measured.transfers), width)
    if measured.interface is not None:
        say("", f"all nodes reach each other on {measured.interface}")
    if measured.collective is not None:
        say("", collective_line(measured.collective))
    say("", *conclusion(found))


def _require_nodes(count: int, partition: str | None) -> None:
    """Raise UserError if no requested partition has ``count`` nodes: salloc would wait without end."""
    rows = parse_sinfo_gres(slurm.run(sinfo_gres_command(partition)).stdout)
    sizes = Counter(row.partition for row in rows if partition or row.default).most_common(1)
    if sizes and count > sizes[0][1]:
        raise UserError(
            f"--nodes {count}: partition {sizes[0][0]} has {sizes[0][1]} nodes; request fewer nodes, or "
            "another --partition"
        )


def _in_an_allocation(arguments: argparse.Namespace) -> int:
    """Request nodes from Slurm and check them there; return the exit code of that check."""
    if arguments.nodes is None and arguments.nodelist is None:
        raise UserError(
            "netcheck runs in an allocation: use salloc or sbatch/netcheck.sbatch, request nodes with "
            "--nodes N, or try it on this machine with --local 4"
        )
    if shutil.which("salloc") is None:
        raise UserError("--nodes: there is no salloc on PATH; log in to a submit host")
    # The check must report a node that fails, and not end with it.
    command = ["salloc", "--ntasks-per-node=1", "--job-name=netcheck", "--no-kill"]
    if arguments.nodes is not None:
        _require_nodes(arguments.nodes, arguments.partition)
        command.append(f"--nodes={arguments.nodes}")
    given = [(option, getattr(arguments, option)) for option in _OF_SALLOC]
    command += [f"--{option}={value}" for option, value in given if value]
    command += [sys.executable, "-m", "hpcrun", "netcheck"]
    command += [f"--{name}={getattr(arguments, name.replace('-', '_'))}" for name, *_ in _MEASURE]
    command += ["--json"] if arguments.json else []
    command += [f"--png={arguments.png}"] if arguments.png is not None else []
    return subprocess.run(command, check=False).returncode
