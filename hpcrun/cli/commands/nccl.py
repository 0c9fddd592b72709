"""Check or choose the environment variables of NCCL, RCCL and PyTorch's NCCL.

  hpcrun nccl lint             this shell's environment
  hpcrun nccl lint train.sh    a script: shell, batch, Dockerfile, Python; a pod
                               or other YAML; a .env file; a log of NCCL
  hpcrun nccl lint gpt.yaml    a config's job.env, job.setup and job.srun_args
  hpcrun nccl lint RUN         the settings of a submitted run
  hpcrun nccl advise           advice for this node, with the reasons
  hpcrun nccl tune             measure collectives, here or in a job, and
                               keep a setting that is significantly faster

`lint` exits with code 1 if it finds an error. For the nodes of an allocation:
`srun --ntasks-per-node=1 --label hpcrun nccl advise`.
"""

import argparse
import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hpcrun.cli.arguments import (
    add_local,
    add_runs_dir,
    find_run_instead,
    require_local,
    require_subcommand,
    runs_dir,
)
from hpcrun.cli.output import plural, print_json
from hpcrun.config.reader import file_layer
from hpcrun.devices.devices import visible_gpus
from hpcrun.errors import UserError
from hpcrun.network import agents, tune
from hpcrun.network.nccl import advise as advice
from hpcrun.network.nccl.files import Reading, read_file, read_text
from hpcrun.network.nccl.lint import NcclFinding, by_severity, lint
from hpcrun.network.nccl.machine import inspect_node
from hpcrun.network.nccl.rules import (
    Setting,
    installed_nccl,
    is_of_network,
    is_version,
    rules,
    settings_of,
)
from hpcrun.printing import progress_bar, say, say_aside
from hpcrun.slurm.placement import step_hosts

_START = 300.0
_MAX_BYTES = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.usage = "hpcrun nccl lint|advise|tune [options] [WHAT]"
    parser.add_argument("what", metavar="lint|advise|tune", nargs="?", help="what to do")
    parser.add_argument(
        "target",
        metavar="WHAT",
        nargs="?",
        help="lint: a script, a config or a run (default: this shell's environment)",
    )
    parser.add_argument(
        "--nccl",
        metavar="VERSION",
        help="NCCL's version in the job (default: the installed wheel's)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_runs_dir(parser)
    group = parser.add_argument_group("lint")
    group.add_argument(
        "--notes", action="store_true", help="print notes too, not only errors and warnings"
    )
    group = parser.add_argument_group("tune")
    add_local(group, "N ranks on this machine instead of an allocation")
    group.add_argument(
        "--backend", choices=("nccl", "gloo"), help="default: nccl with GPUs, else gloo"
    )
    group.add_argument(
        "--deterministic",
        action="store_true",
        help="only settings that keep the order of addition",
    )
    group.add_argument(
        "--sizes",
        default="8:1G:16",
        metavar="A:B:F",
        help="bytes from A to B, by factor F (default: 8:1G:16)",
    )
    group.add_argument(
        "--collectives",
        nargs="+",
        choices=tune.COLLECTIVES,
        metavar="NAME",
        default=tune.COLLECTIVES,
        help=f"{', '.join(tune.COLLECTIVES)} (default: all)",
    )
    group.add_argument(
        "--seconds",
        type=float,
        default=tune.Grid.seconds,
        metavar="S",
        help=f"seconds per size in a trial (default {tune.Grid.seconds:g})",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run ``lint``, ``advise`` or ``tune``."""
    commands = {"lint": _lint, "advise": _advise, "tune": _tune}
    what = require_subcommand("nccl", arguments.what, [*commands], "check")
    if arguments.nccl is not None and not is_version(arguments.nccl):
        raise UserError(f"--nccl {arguments.nccl}: should be a version such as 2.27.5")
    if arguments.target is not None and what != "lint":
        raise UserError(f"nccl {what} {arguments.target}: {what} takes no file; only lint does")
    return commands[what](arguments)


def _lint(arguments: argparse.Namespace) -> int:
    """Print the findings; return 1 if a finding is an error."""
    version = arguments.nccl or installed_nccl()
    reading, name = _read(arguments)
    findings = by_severity([*reading.findings, *lint(reading.settings, version)])
    names = sorted({one.name for one in reading.settings if is_of_network(one.name)})
    if not (arguments.notes or arguments.json):
        findings = [finding for finding in findings if finding.level != "note"]
    if arguments.json:
        known = [one.as_record() for one in findings]
        facts = {"checked": name, "nccl": version or rules().newest, "variables": names}
        print_json(facts | {"findings": known})
    else:
        _print_findings(findings, name, version, len(names))
    return int(any(finding.level == "error" for finding in findings))


def _read(arguments: argparse.Namespace) -> tuple[Reading, str]:
    """Return the settings, the findings about the lines that make them, and the name of the source."""
    target: str | None = arguments.target
    if target is None:
        return Reading(tuple(settings_of(os.environ, "environment"))), "the environment"
    path = Path(target)
    if not path.is_file():
        directory = find_run_instead(target, runs_dir(arguments), "no such file")
        return _of_run(directory.config), directory.name
    reading = read_file(path)
    if path.suffix.lower() in (".yaml", ".yml", ".json") and not reading.settings:
        # A file without a variable may be a broken config, which gets its own line.
        file_layer(path)
    return reading, target


def _of_run(config: Path) -> Reading:
    """Return the settings of a run's config; the lines of ``job.setup`` are one script."""
    layer, read = file_layer(config), read_file(config)
    job = layer.values.get("job")
    setup = job.get("setup") if isinstance(job, Mapping) else None
    if not isinstance(setup, list):
        return read
    lines = [(number, line) for number, item in enumerate(setup) for line in str(item).split("\n")]
    script = read_text("\n".join(line for _, line in lines), "")

    def placed(setting: Setting) -> Setting:
        number, _ = lines[int(setting.where.rpartition(":")[2]) - 1]
        return replace(setting, where=layer.where.get(f"job.setup.{number}", str(config)))

    # What one item sets, another may export.
    together = [replace(one, setting=placed(one.setting)) for one in script.findings]
    return Reading(read.settings, (*read.findings, *together))


def _print_findings(
    findings: Sequence[NcclFinding], name: str, version: str | None, count: int
) -> None:
    for finding in findings:
        shown = finding.setting
        value = "" if shown.value is None else f"={shown.value}"
        say(f"{shown.where}: {finding.level}: {shown.name}{value}: {finding.message}")
    if findings:
        addresses = sorted({rules().sources[finding.source] for finding in findings})
        say("", "sources:", *(f"  {address}" for address in addresses))
    counts = [
        plural(number, level)
        for level in ("error", "warning", "note")
        if (number := sum(finding.level == level for finding in findings))
    ]
    known = version or f"{rules().newest}, the newest known"
    if not (count or findings):
        say_aside(
            f"hpcrun: {name}: no variable of NCCL, RCCL, PyTorch, gloo, libfabric or UCX found"
        )
        return
    read = f"{plural(count, 'variable')} in {name}"
    say_aside(f"hpcrun: {read}: {', '.join(counts) or 'nothing is wrong'} (NCCL {known})")


def _advise(arguments: argparse.Namespace) -> int:
    """Print the advice for this node."""
    lines = advice.advise(inspect_node(os.environ, step_hosts(os.environ)), arguments.nccl)
    if arguments.json:
        print_json(advice.as_data(lines))
        return 0
    say(*advice.as_shell(lines).split("\n"))
    for line in lines:
        if line.name is not None and os.environ.get(line.name, line.value) != line.value:
            say_aside(
                f"hpcrun: this shell has {line.name}={os.environ[line.name]}, not {line.value}"
            )
    return 0


def _tune(arguments: argparse.Namespace) -> int:
    """Search for faster settings for the collectives of this allocation or machine, and print them."""
    _require_sense(arguments)
    gpus = visible_gpus(os.environ)
    if arguments.backend == "nccl" and not gpus:
        raise UserError("--backend nccl: no GPU is visible here; use --backend gloo")
    grid = tune.Grid(
        arguments.backend or ("nccl" if gpus else "gloo"),
        arguments.collectives,
        tune.sizes_of(arguments.sizes),
        seconds=arguments.seconds,
    )
    begin, names, count = _place(arguments, gpus)
    nodes = agents.start(begin, names, _START)
    try:
        crew = tune.TuneNodes(nodes, count)
        with progress_bar("trial") as bar:
            done = itertools.count(1)

            def trial(env: tune.Env) -> tune.Trial:
                measured = crew.trial(env, grid)
                bar.move(next(done))
                return measured

            found = tune.search(
                trial,
                tune.knobs_for(
                    grid.backend, crew.site, os.environ, deterministic=arguments.deterministic
                ),
                bar.describe,
            )
    finally:
        nodes.close()
    if all(one.problem for one in found.default) and not found.env:
        raise UserError(f"no collective could be measured: {found.default[0].problem}")
    if arguments.json:
        facts = {"backend": grid.backend, "ranks": crew.ranks, "nodes": len(names)}
        print_json(facts | tune.as_data(found))
    else:
        where = "this machine" if arguments.local is not None else f"{len(names)} nodes"
        say(f"{grid.backend}, {crew.ranks} ranks, {where}", *tune.finding_lines(found))
    return 0


def _require_sense(arguments: argparse.Namespace) -> None:
    require_local(arguments.local, 2)
    if not 0 < arguments.seconds < 3600:
        raise UserError(f"--seconds {arguments.seconds:g}: should be above 0 seconds")


def _place(arguments: argparse.Namespace, gpus: int) -> tuple[agents.Begin, Sequence[str], int]:
    """Return the function that starts the agents, the names of the nodes, and the ranks on each."""
    if arguments.local is not None:
        return agents.here, ["127.0.0.1"], arguments.local
    if "SLURM_JOB_ID" not in os.environ:
        raise UserError(
            "nccl tune runs in an allocation (salloc, sbatch); on one machine, give the number of ranks, "
            "such as --local 2"
        )
    nodes = step_hosts(os.environ)
    tasks = gpus or 1
    if len(nodes) * tasks < 2:
        raise UserError(
            "this allocation has one rank, so nothing is sent; request more nodes, or use --local 2"
        )
    return agents.on_slurm(), nodes, tasks
