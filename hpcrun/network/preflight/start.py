"""The start of a preflight's agents: one task per node by srun, or processes of this machine."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hpcrun.network.check import fleet
from hpcrun.network.preflight.coordinator import Coordinator
from hpcrun.network.preflight.preflight_facts import JobNeeds, PreflightFacts
from hpcrun.slurm.environment import without_rank_requests

_AGENT = ("-m", "hpcrun.network.preflight.agent")


# Factor of the time for the second start.
_SECOND = 2.0


def check_nodes(
    nodes: Sequence[str],
    asked: JobNeeds,
    *,
    folder: Path | None,
    interface: str | None = None,
    python: str | None = None,
    container: Sequence[str] = (),
    environ: Mapping[str, str] = os.environ,
) -> PreflightFacts:
    """Check ``nodes`` of this allocation, in the environment of the ranks.

    Args:
        folder: a shared folder, in which the nodes write and read files; None: no such check.
        interface: ``job.interface``.
        python: ``job.python``.
        container: ``job.container``.
    """
    own = without_rank_requests(environ)
    agent = [*container, python or sys.executable, *_AGENT]

    def begin(here: Sequence[str]) -> fleet.Fleet:
        command = fleet.srun_command(here, agent)
        command[1:1] = ["--mem=0", "--cpu-bind=none", "--export=ALL"]
        return fleet.Processes([(command, own)])

    return check_twice(begin, nodes, asked, folder, interface)


def check_here(
    count: int, asked: JobNeeds, *, folder: Path | None, environ: Mapping[str, str] = os.environ
) -> PreflightFacts:
    """Check this machine with ``count`` processes instead of nodes."""
    names = [f"local{index}" for index in range(count)]
    command = [sys.executable, *_AGENT]

    def begin(here: Sequence[str]) -> fleet.Fleet:
        return fleet.Processes([(command, {**environ, "HPCRUN_CHECK_NAME": name}) for name in here])

    return check_twice(begin, names, asked, folder, None)


def check_twice(
    begin: Callable[[Sequence[str]], fleet.Fleet],
    nodes: Sequence[str],
    asked: JobNeeds,
    folder: Path | None,
    interface: str | None,
) -> PreflightFacts:
    """Check ``nodes``; check nodes that do not answer in time a second time.

    A slow file system delays the start of an agent on a sound node. A node is unfit if it does not answer
    twice, or if srun reports that no task can start there. Such a node prevents the start of all tasks, so
    the other nodes are started again.

    Args:
        begin: starts an agent on each of the given nodes.
    """
    lost: dict[str, str] = {}
    while True:
        here = [node for node in nodes if node not in lost]
        started, measured = _talk(begin, here, asked, folder, interface)
        dead = fleet.not_launched(started.words(), here)
        if lost or not dead or len(dead) == len(here) or len(measured.silent) < len(here):
            break
        lost = dict.fromkeys(dead, "srun cannot start a task there")
    if measured.silent:
        late = list(measured.silent)
        started, again = _talk(begin, late, asked, folder, interface, slack=_SECOND)
        measured.add_second(again)
    if len(measured.silent) == len(here) and not lost:
        words = " ".join(started.words().split())[:300]
        measured.silent = dict.fromkeys(here, words or "no answer")
    measured.nodes, measured.silent = list(nodes), lost | measured.silent
    return measured


def _talk(
    begin: Callable[[Sequence[str]], fleet.Fleet],
    nodes: list[str],
    asked: JobNeeds,
    folder: Path | None,
    interface: str | None,
    slack: float = 1.0,
) -> tuple[fleet.Fleet, PreflightFacts]:
    started = begin(nodes)
    try:
        talk = Coordinator(started, nodes, asked, folder=folder, interface=interface, slack=slack)
        return started, talk.run()
    finally:
        started.close()
