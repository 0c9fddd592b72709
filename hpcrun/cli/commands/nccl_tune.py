"""`hpcrun nccl tune`: find faster settings for the collectives of this allocation or machine."""

import argparse
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from hpcrun.cli.arguments import add_local, require_local
from hpcrun.cli.output import print_json
from hpcrun.devices.devices import visible_gpus
from hpcrun.errors import UserError
from hpcrun.network.agents import Processes
from hpcrun.network.tune.search import (
    MIN_EFFECT,
    Env,
    Found,
    Trial,
    as_data,
    as_yaml,
    collectives_of,
    finding_lines,
    knobs_for,
    search,
    sizes_of,
)
from hpcrun.network.tune.trials import Grid, TrialRanks, here, on_slurm
from hpcrun.printing import escaped, say, say_aside
from hpcrun.ranks.launchers import step_hosts
from hpcrun.run.files import write_atomic


def add_arguments(group: argparse._ArgumentGroup) -> None:
    """Add the options of ``tune`` to a group of the command's options."""
    add_local(group, "N ranks on this machine instead of an allocation")
    group.add_argument(
        "--backend", choices=("nccl", "gloo"), help="default: nccl with GPUs, else gloo"
    )
    group.add_argument(
        "--tasks-per-node", type=int, metavar="N", help="ranks per node (default: its GPUs, or 1)"
    )
    group.add_argument(
        "--sizes",
        default="8:1G:16",
        metavar="A:B:F",
        help="bytes from A to B, by factor F (default: 8:1G:16)",
    )
    group.add_argument(
        "--collectives",
        default="all_reduce,all_gather,reduce_scatter,broadcast,alltoall,sendrecv",
        metavar="LIST",
        help="comma-separated names (default: all six)",
    )
    group.add_argument(
        "--deterministic",
        action="store_true",
        help="only settings that keep the order of addition",
    )
    group.add_argument(
        "--effect",
        type=float,
        default=MIN_EFFECT,
        metavar="SHARE",
        help=f"smallest gain that counts (default {MIN_EFFECT:g})",
    )
    group.add_argument(
        "--seconds",
        type=float,
        default=Grid.seconds,
        metavar="S",
        help=f"seconds per size in a trial (default {Grid.seconds:g})",
    )
    group.add_argument(
        "--longest",
        type=float,
        default=Grid.longest,
        metavar="S",
        help=f"skip sizes at which a call takes longer (default {Grid.longest:g})",
    )
    group.add_argument("--out", type=Path, metavar="FILE", help="write job.env as YAML")


def run(arguments: argparse.Namespace) -> int:
    """Search and print."""
    _require_sense(arguments)
    grid = Grid(
        _backend(arguments),
        collectives_of(arguments.collectives),
        sizes_of(arguments.sizes),
        seconds=arguments.seconds,
        longest=arguments.longest,
    )
    start, ranks, where = _ranks(arguments)
    with (
        TrialRanks(start(), ranks) as crew,
        tqdm(disable=None, unit="trial", file=sys.stderr, leave=False) as bar,
    ):
        knobs = knobs_for(
            grid.backend, crew.site, os.environ, deterministic=arguments.deterministic
        )
        found = search(
            lambda env: _trial(crew, env, grid, bar),
            knobs,
            lambda text: bar.set_description(escaped(text)),
            effect=arguments.effect,
        )
    about = f"{grid.backend}, {ranks} ranks, {where}"
    _require_figures(found)
    if arguments.json:
        facts = {"backend": grid.backend, "ranks": ranks, "where": where}
        print_json(as_data(found, ranks, facts))
    else:
        _print(found, about, arguments)
    if arguments.out is not None:
        write_atomic(arguments.out, as_yaml(found, about), mode=0o644)
        say_aside(f"hpcrun: written: {arguments.out}")
    return 0


def _trial(crew: TrialRanks, env: Env, grid: Grid, bar: "tqdm[Any]") -> Trial:
    trial = crew.trial(env, grid)
    bar.update()
    return trial


def _require_sense(arguments: argparse.Namespace) -> None:
    if arguments.target is not None:
        raise UserError(f"nccl tune {arguments.target}: tune takes no file; see --out")
    require_local(arguments.local, 2)
    if arguments.tasks_per_node is not None and arguments.tasks_per_node < 1:
        raise UserError(f"--tasks-per-node {arguments.tasks_per_node}: should be 1 or more")
    if not 0.01 <= arguments.effect < 1:
        raise UserError(f"--effect {arguments.effect:g}: should be from 0.01 to 1, such as 0.05")
    for name in ("seconds", "longest"):
        if not 0 < getattr(arguments, name) < 3600:
            raise UserError(f"--{name} {getattr(arguments, name):g}: should be above 0 seconds")
    if arguments.out is not None and not arguments.out.absolute().parent.is_dir():
        raise UserError(f"--out {arguments.out}: its folder does not exist; make it first")


def _backend(arguments: argparse.Namespace) -> str:
    gpus = visible_gpus(os.environ)
    if arguments.backend == "nccl" and not gpus:
        raise UserError("--backend nccl: no GPU is visible here; use --backend gloo")
    return arguments.backend or ("nccl" if gpus else "gloo")


def _ranks(arguments: argparse.Namespace) -> tuple[Callable[[], Processes], int, str]:
    """Return the function that starts the ranks, their number, and their place."""
    if arguments.local is not None:
        return partial(here, arguments.local), arguments.local, "this machine"
    if "SLURM_JOB_ID" not in os.environ:
        raise UserError(
            "nccl tune runs in an allocation (salloc, sbatch); on one machine, give the number of ranks, "
            "such as --local 2"
        )
    nodes = step_hosts(os.environ)
    tasks = arguments.tasks_per_node or visible_gpus(os.environ) or 1
    if len(nodes) * tasks < 2:
        raise UserError(
            "this allocation has one rank, so nothing is sent; request more nodes, or give --tasks-per-node"
        )
    return partial(on_slurm, nodes, tasks), len(nodes) * tasks, f"{len(nodes)} nodes"


def _require_figures(found: Found) -> None:
    """Raise UserError if no trial has worked."""
    trials = [*found.default, *found.setting]
    if all(trial.problem for trial in trials):
        raise UserError(f"no collective could be measured: {trials[0].problem}")


def _print(found: Found, about: str, arguments: argparse.Namespace) -> None:
    say(about, *finding_lines(found))
    if arguments.out is None and found.env:
        say("", *as_yaml(found, about).rstrip("\n").split("\n"))
