"""Check a job's network: names, latency, ports, bandwidth, RDMA, all-reduce.

Needs neither GPUs nor root. All pairs are measured in parallel rounds: 16
nodes take 45 seconds. The result names a bad node or a bad link. --links adds
a table of all pairs. RDMA is measured with ib_write_bw, where it is installed.

  salloc --nodes 8 --no-kill hpcrun netcheck
  sbatch --nodes 8 sbatch/netcheck.sbatch
  hpcrun netcheck --local 4    four processes on this machine, to see a report

Exit code 1: a problem was found; the last line has the --exclude option to use.
"""

import argparse
import os
from collections.abc import Sequence
from functools import partial

from hpcrun import slurm
from hpcrun.cli.arguments import add_local, require_local
from hpcrun.cli.output import print_json
from hpcrun.errors import UserError
from hpcrun.network.agents import here, on_slurm, start
from hpcrun.network.findings import (
    as_data,
    collective_line,
    conclusion,
    findings,
    node_lines,
)
from hpcrun.network.link_table import link_lines
from hpcrun.network.measurements import NetworkMeasurements
from hpcrun.network.netcheck import Check, Options
from hpcrun.network.probes import Finding
from hpcrun.network.rdma import rdma_lines
from hpcrun.printing import ProgressBar, progress_bar, say
from hpcrun.slurm.placement import step_hosts

_ALL_REDUCE, _RDMA = 60.0, 2
# Name, default, least value, help.
_MEASURE: Sequence[tuple[str, float, float, str]] = (
    ("seconds", Options.seconds, 0.1, "seconds per round"),
    ("streams", Options.streams, 1, "connections per pair"),
    ("rdma", _RDMA, 0, "seconds per RDMA measurement (ib_write_bw of perftest); 0: none"),
    ("patience", Options.patience, 1, "seconds for the nodes to start"),
    ("all-reduce", _ALL_REDUCE, 0, "timeout of the final all-reduce in seconds; 0: none"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    how = parser.add_argument_group("how to measure")
    for name, default, _, text in _MEASURE:
        words = f"{text} (default {default:g})"
        how.add_argument(f"--{name}", type=type(default), default=default, metavar="N", help=words)
    parser.add_argument("--links", action="store_true", help="also print a table of all pairs")
    add_local(how, "N processes on this machine instead of nodes")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; return 1 if something is wrong."""
    _require_sense(arguments)
    if arguments.local is None and "SLURM_JOB_ID" not in os.environ:
        raise UserError(
            "netcheck runs in an allocation: use salloc or sbatch/netcheck.sbatch, or try it on this machine "
            "with --local 4"
        )
    measured = _measure(arguments, step_hosts(os.environ))
    found = findings(measured)
    if arguments.json:
        print_json(as_data(measured, found))
    else:
        _print(measured, found, links=arguments.links, rdma=bool(arguments.rdma))
    return int(bool(found))


def _require_sense(arguments: argparse.Namespace) -> None:
    for name, _, least, _ in _MEASURE:
        value = getattr(arguments, name.replace("-", "_"))
        if value < least:
            raise UserError(f"--{name} {value}: should be at least {least}")
    require_local(arguments.local, 2)


def _measure(arguments: argparse.Namespace, hosts: Sequence[str]) -> NetworkMeasurements:
    local = arguments.local is not None
    names = [f"127.0.0.{index + 1}" for index in range(arguments.local)] if local else list(hosts)
    if len(names) < 2:
        raise UserError(
            f"this allocation has {len(names)} node: a check of links needs at least 2; request more with "
            "salloc --nodes"
        )
    options = Options(
        seconds=arguments.seconds,
        streams=arguments.streams,
        rdma=arguments.rdma,
        all_reduce=arguments.all_reduce,
        patience=arguments.patience,
    )
    with progress_bar("round", text="starting") as bar:
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


def _show(bar: ProgressBar, step: int, steps: int, text: str) -> None:
    bar.move(step, steps)
    bar.describe(text)


def _print(measured: NetworkMeasurements, found: list[Finding], *, links: bool, rdma: bool) -> None:
    say(*node_lines(measured))
    if links:
        say("", *link_lines(measured))
    if rdma and (lines := rdma_lines(measured.rdma, measured.no_rdma)):
        say("", *lines)
    if measured.collective is not None:
        say("", collective_line(measured.collective))
    say("", *conclusion(found))
