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
from hpcrun.network.check import fleet
from hpcrun.network.check.coordinator import Check, Options, Progress
from hpcrun.network.check.findings import THRESHOLD, NetworkFinding, findings
from hpcrun.network.check.measurements import NetworkMeasurements
from hpcrun.network.check.report import (
    as_data,
    collective_line,
    finding_lines,
    node_lines,
    table,
    write_png,
)
from hpcrun.network.check.wire import tried_ports
from hpcrun.printing import escaped, say, show_table
from hpcrun.ranks.addresses import port_candidates
from hpcrun.ranks.launchers import step_hosts
from hpcrun.slurm.nodes import parse_sinfo_gres, sinfo_gres_command

_TOOLS = ("auto", "sockets", "iperf3")
_WIDE_TABLE = 40
_ALL_REDUCE = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    how = parser.add_argument_group("how to measure")
    how.add_argument(
        "--seconds", type=float, default=3.0, metavar="S", help="seconds per round (default 3)"
    )
    how.add_argument(
        "--streams", type=int, default=4, metavar="N", help="connections per pair (default 4)"
    )
    how.add_argument(
        "--with",
        dest="tool",
        choices=_TOOLS,
        default="auto",
        help="sockets: built in; iperf3; auto: iperf3 if installed",
    )
    how.add_argument(
        "--threshold",
        type=float,
        default=THRESHOLD,
        metavar="SHARE",
        help=f"a rate below this share of the usual rate is slow (default {THRESHOLD:g})",
    )
    how.add_argument(
        "--patience",
        type=float,
        default=Options.patience,
        metavar="S",
        help=f"seconds for the nodes to start (default {Options.patience:g})",
    )
    how.add_argument(
        "--all-reduce",
        type=float,
        default=_ALL_REDUCE,
        metavar="S",
        help=f"timeout of the final all-reduce in seconds (default {_ALL_REDUCE:g}; 0: none)",
    )
    how.add_argument("--seed", type=int, default=0, help="seed for the random pairs above 64 nodes")
    add_local(how, "N processes on this machine instead of nodes")
    where = parser.add_argument_group("which nodes (outside an allocation)")
    where.add_argument("--nodes", type=int, metavar="N", help="request N nodes from Slurm")
    where.add_argument("--nodelist", metavar="NODES", help="request these nodes from Slurm")
    for option in ("partition", "account", "qos", "reservation", "exclude", "time"):
        where.add_argument(f"--{option}", metavar="WORD", help=f"salloc's --{option}")
    what = parser.add_argument_group("what to print")
    what.add_argument("--json", action="store_true", help="print one JSON object")
    what.add_argument("--png", type=Path, metavar="FILE", help="draw the rates")


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; return 1 if something is wrong."""
    _require_sense(arguments)
    hosts = step_hosts(os.environ)
    if arguments.local is None and "SLURM_JOB_ID" not in os.environ:
        return _in_an_allocation(arguments)
    measured = _measure(arguments, hosts)
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
    for name, low in (("seconds", 0.1), ("streams", 1), ("patience", 1), ("all_reduce", 0)):
        if getattr(arguments, name) < low:
            option = name.replace("_", "-")
            raise UserError(f"--{option} {getattr(arguments, name)}: should be at least {low}")
    if not 0 < arguments.threshold < 1:
        raise UserError(f"--threshold {arguments.threshold}: should be between 0 and 1")
    require_local(arguments.local, 2)
    if arguments.nodes is not None and arguments.nodes < 2:
        raise UserError(f"--nodes {arguments.nodes}: a check of links needs at least 2")


def _measure(arguments: argparse.Namespace, hosts: Sequence[str]) -> NetworkMeasurements:
    if arguments.local is not None:
        names = [f"127.0.0.{index + 1}" for index in range(arguments.local)]
    elif len(hosts) < 2:
        raise UserError(
            f"this allocation has {len(hosts)} node: a check of links needs at least 2; request more with "
            "salloc --nodes, or leave the allocation and use --nodes"
        )
    else:
        names = list(hosts)
    job = os.environ.get("SLURM_JOB_ID", "0")
    options = Options(
        seconds=arguments.seconds,
        streams=arguments.streams,
        # Processes on one machine cannot share iperf3's port.
        tool="sockets" if arguments.local and arguments.tool == "auto" else arguments.tool,
        port=port_candidates(job, 1)[0],
        # These processes cannot hold the same ports either.
        ports=() if arguments.local else tuple(tried_ports(os.environ, job)),
        all_reduce=arguments.all_reduce,
        seed=arguments.seed,
        threshold=arguments.threshold,
        patience=arguments.patience,
    )
    with tqdm(disable=None, unit="round", file=sys.stderr, leave=False) as bar:
        progress = partial(_show, bar)
        if arguments.local is None:
            return _on_slurm(names, options, progress)
        return _check(fleet.on_this_machine(len(names)), names, options, progress)


def _on_slurm(names: list[str], options: Options, progress: Progress) -> NetworkMeasurements:
    """Check the nodes on which a task starts: if one node does not answer, srun starts no task at all."""
    lost: dict[str, str] = {}
    while True:
        started = fleet.on_slurm([name for name in names if name not in lost])
        here = [name for name in names if name not in lost]
        measured = _check(started, here, options, progress)
        if measured.ended:
            states = slurm.parse_sinfo(slurm.run(slurm.sinfo_command(here)).stdout)
            down = [name for name in here if states.get(name, "").startswith("down")]
            measured.silent = dict.fromkeys(down, "Slurm has it as down") | measured.silent
        dead = fleet.not_launched(started.words(), here)
        if len(measured.silent) < len(here) or not dead or len(here) - len(dead) < 2:
            break
        lost |= dict.fromkeys(dead, "srun cannot start a task there")
    if len(measured.silent) == len(here) and not lost:
        words = " ".join(started.words().split())[:300] or "no task answered"
        raise UserError(f"srun on {len(here)} nodes: {words}")
    measured.nodes, measured.silent = names, lost | measured.silent
    return measured


def _check(
    started: fleet.Processes, names: list[str], options: Options, progress: Progress
) -> NetworkMeasurements:
    try:
        return Check(started, names, options, progress).run()
    finally:
        started.close()


def _show(bar: "tqdm[Any]", step: int, steps: int, text: str) -> None:
    bar.total, bar.n = steps, step
    bar.set_description(escaped(text), refresh=False)
    bar.refresh()


def _print(measured: NetworkMeasurements, found: list[NetworkFinding]) -> None:
    say(*node_lines(measured))
    if len(measured.nodes) <= _WIDE_TABLE and measured.transfers:
        say("", "Gbit/s, from row to column")
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 400
        show_table(table(measured.nodes, measured.transfers), width)
    if measured.interface is not None:
        say("", f"all nodes reach each other on {measured.interface}")
    if measured.collective is not None:
        say("", collective_line(measured.collective))
    say("", *finding_lines(found))


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
    asked = ["--ntasks-per-node=1", "--job-name=netcheck", "--no-kill"]
    if arguments.nodes is not None:
        _require_nodes(arguments.nodes, arguments.partition)
        asked.append(f"--nodes={arguments.nodes}")
    for option in ("nodelist", "partition", "account", "qos", "reservation", "exclude", "time"):
        value = getattr(arguments, option)
        asked += [f"--{option}={value}"] if value else []
    inner = [sys.executable, "-m", "hpcrun", "netcheck", f"--with={arguments.tool}"]
    for name in ("seconds", "streams", "seed", "all_reduce", "threshold", "patience"):
        inner.append(f"--{name.replace('_', '-')}={getattr(arguments, name)}")
    inner += ["--json"] if arguments.json else []
    inner += [f"--png={arguments.png}"] if arguments.png is not None else []
    return subprocess.run(["salloc", *asked, *inner], check=False).returncode
