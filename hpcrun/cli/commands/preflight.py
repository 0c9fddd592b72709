"""Check every node of a job in seconds, before it starts.

Checks GPUs, a small matrix product, space, limits, names, versions, and the run
directory as each node sees it.

  hpcrun preflight             in an allocation (salloc, or a batch script)
  hpcrun preflight RUN         there, with the GPUs, container, files of a run
  hpcrun preflight --local 2   two processes on this machine, to see a report

With `job.preflight: true`, each start of a job does this before its ranks. A
node that fails is excluded, and the job is requeued.

Exit code 1: a check failed; the last line has the --exclude option to use.
"""

import argparse
import os
import signal
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hpcrun.cli.arguments import add_local, require_local
from hpcrun.cli.output import print_json
from hpcrun.devices.devices import given_gpus
from hpcrun.errors import UserError
from hpcrun.network.gpu_probes import own_version
from hpcrun.network.preflight import (
    PreflightFacts,
    as_data,
    check_here,
    check_nodes,
    failures,
    lines,
    results,
)
from hpcrun.network.probes import Probe, added_probe
from hpcrun.ports.node_checks import Needs
from hpcrun.printing import say, say_aside
from hpcrun.run.attempt import attempt_here
from hpcrun.run.directory import RunDirectory
from hpcrun.run.journal.journal import Journal
from hpcrun.run.reports import record_report
from hpcrun.slurm.containers import Container, container_of, image_request
from hpcrun.slurm.placement import in_local_cluster, job_id, step_hosts

if TYPE_CHECKING:
    from hpcrun.config import Job


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("run", type=Path, nargs="?", metavar="RUN", help="a run directory")
    add_local(parser, "N processes here instead of nodes")
    parser.add_argument(
        "--gpus", type=int, metavar="N", help="GPUs expected on each node (default: the job's)"
    )
    parser.add_argument(
        "--check",
        action="append",
        default=[],
        metavar="NAME",
        help="run the check NAME of another package too; may be repeated",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, with all facts")
    parser.add_argument(
        "--before-ranks",
        action="store_true",
        help="write the report to this attempt's logs (used when a job starts)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Check and print; return 1 if a check fails."""
    if arguments.before_ranks:
        return _before_ranks(arguments)
    require_local(arguments.local, 1)
    if arguments.gpus is not None and arguments.gpus < 0:
        raise UserError(f"--gpus {arguments.gpus}: should be at least 0")
    directory = None if arguments.run is None else RunDirectory(arguments.run.absolute())
    if directory is not None and not directory.config.is_file():
        raise UserError(f"{arguments.run}: there is no such run; `hpcrun status` lists the runs")
    measured = _measure(arguments, directory, directory.path if directory else Path.cwd())
    found = results(measured)
    if arguments.json:
        print_json(as_data(measured, found))
    else:
        say(*lines(measured, found))
    return int(bool(failures(found)))


def _measure(
    arguments: argparse.Namespace, directory: RunDirectory | None, folder: Path
) -> PreflightFacts:
    hosts = step_hosts(os.environ)
    run = str(directory.path) if directory else None
    job = _job(directory)
    names = dict.fromkeys([*(job.node_checks if job else ()), *arguments.check])
    added = _added(list(names), skip=arguments.before_ranks)
    gpus = arguments.gpus
    if gpus is None and job is not None and job.cpu:
        gpus = 0
    if arguments.local is not None or in_local_cluster(os.environ):
        # A job of the local cluster trains on the CPU if there is no GPU.
        return check_here(arguments.local or 1, Needs(gpus, run), folder=folder, added=added)
    if not hosts:
        raise UserError(
            "preflight runs in an allocation: use salloc or a batch script, or try it on this machine "
            "with --local 2"
        )
    if gpus is None:
        gpus = job.gpus if job is not None else given_gpus(os.environ) or None
    return check_nodes(
        Needs(
            gpus,
            run,
            hosts,
            job.interface if job else None,
            job.image if job else None,
            own_version(),
        ),
        folder=folder,
        python=job.python if job else None,
        container=_container(job, directory),
        added=added,
    )


def _added(names: Sequence[str], *, skip: bool) -> list[Probe]:
    """Return the checks of other packages.

    Raises:
        UserError: a check does not exist or work, unless ``skip``: then a line names it, and the rest runs.
    """
    found = []
    for name in names:
        try:
            found.append(added_probe(name))
        except UserError as error:
            if not skip:
                raise
            say_aside(f"hpcrun: job.node_checks: {error}")
    return found


def _container(job: "Job | None", directory: RunDirectory | None) -> Container:
    """Return the start of the ranks' container, in which the agents run too."""
    image = image_request(job) if job else None
    if image is None or directory is None:
        return Container(prefix=job.container if job else ())
    return container_of(image, directory, Path.cwd(), slurm=True)


def _job(directory: RunDirectory | None) -> "Job | None":
    if directory is None:
        return None
    from hpcrun.slurm.own_config import load_own

    return load_own(directory).job


def _before_ranks(arguments: argparse.Namespace) -> int:
    """Check the nodes of this job; return 1 if no rank may start.

    The reason is a failed check or a cancellation. While earlier steps of the job end, a node may not answer;
    such a node is checked once more.
    """
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        # These signals warn the ranks, and must not end the check.
        signal.signal(number, signal.SIG_IGN)
    directory, job = RunDirectory(arguments.run.absolute()), job_id(os.environ)
    if job is None:
        raise UserError("preflight: --before-ranks works in a job only; remove the option")
    folder = directory.attempt_logs(attempt_here(job, os.environ))
    code = _checked(arguments, directory, folder)
    try:
        cancelled = Journal(directory).read().was_cancelled(job)
    except OSError as error:
        say_aside(f"hpcrun: cannot check for a cancellation: {error}")
        return code
    if cancelled:
        say_aside(
            f"hpcrun: job {job} was cancelled: no rank starts; `hpcrun resume {directory.name}` continues it"
        )
        return 1
    return code


def _checked(arguments: argparse.Namespace, directory: RunDirectory, folder: Path) -> int:
    """Check the nodes and write the report to ``folder``; return 1 if a check fails."""
    try:
        measured = _measure(arguments, directory, folder)
    except UserError as error:
        say_aside(f"hpcrun: the nodes are not checked: {error}")
        return 0
    except Exception as error:
        # An error in a check must not stop the job.
        say_aside(*traceback.format_exc().splitlines())
        say_aside(f"hpcrun: the nodes are not checked: {error}")
        return 0
    if len(measured.silent) == len(measured.nodes):
        words = next(iter(measured.silent.values()))
        say_aside(f"hpcrun: the nodes are not checked: {words}")
        return 0
    found = results(measured)
    say(*(f"hpcrun: preflight: {line}" for line in lines(measured, found) if line))
    try:
        record_report(folder, as_data(measured, found))
    except OSError as error:
        say_aside(f"hpcrun: the report is not written: {error}")
    return int(bool(failures(found)))
