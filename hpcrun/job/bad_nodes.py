"""Record a node that failed an attempt, and exclude nodes that fail often from the next attempt."""

import os
import sys
from collections.abc import Collection
from dataclasses import replace

from hpcrun import slurm
from hpcrun.diagnose.causes import blames_node
from hpcrun.job.finalize import Classification
from hpcrun.run.attempt import Attempt
from hpcrun.run.directory import RunDirectory
from hpcrun.run.journal.events import Cause, Excluded, Opened, Started, Submitted
from hpcrun.run.journal.journal import Journal
from hpcrun.run.journal.state import State
from hpcrun.slurm.avoided_nodes import (
    add_failure,
    bad_nodes_path,
    excluded_nodes,
    nodes_to_avoid,
    request_of,
)


def exclude_bad_nodes(
    run: RunDirectory,
    attempt: Attempt,
    classification: Classification,
    waiting: str,
    *,
    after: int | None,
    hours: float,
) -> None:
    """Exclude bad nodes from the next start of the job ``waiting`` (Slurm refuses to change a running job).

    Args:
        attempt: the attempt that has ended, with its ``classification``.
        after: number of failures from which a node is excluded; None: never.
        hours: only failures of the last ``hours`` hours count.
    """
    shown = slurm.run(slurm.scontrol_show_job_command(waiting))
    if shown.returncode != 0:
        return
    facts = slurm.parse_show_job(shown.stdout)
    journal = Journal(run)
    state = classification.state or journal.read()
    request = request_of(facts, _nodes_of(state, attempt))
    least = _least_nodes(state)
    if least is not None:
        request = replace(request, nodes=least)
    found = classification.diagnosis
    unfit = found.unfit if found else ()
    bad = nodes_to_avoid(request, after=after, hours=hours, unfit=unfit)
    if not bad:
        return
    given = _given_by_the_user(state, attempt, excluded_nodes(facts))
    reported = slurm.run(slurm.scontrol_exclude_command(waiting, [*given, *bad]))
    if reported.returncode != 0:
        words = " ".join(reported.stderr.split())
        _print(f"cannot exclude {', '.join(bad)}: {words}")
        return
    journal.note(Excluded(attempt=attempt, hosts=bad))
    _print(f"excludes {', '.join(bad)}: {'unfit, or ' if unfit else ''}failed too often")


def record_bad_nodes(run: RunDirectory, attempt: Attempt, classification: Classification) -> None:
    """Add the nodes that caused a crash or failed a preflight, if any, to the user's bad-node list."""
    found = classification.diagnosis
    if found is None or found.host is None or not blames_node(found):
        return
    if classification.cause is not Cause.CRASH and not found.unfit:
        return
    try:
        for host in found.unfit or (found.host,):
            add_failure(bad_nodes_path(), host, found.line, str(run.path), attempt.owner)
    except OSError as error:
        _print(f"the bad-node list is not written: {error}")


def _given_by_the_user(state: State, attempt: Attempt, excluded: Collection[str]) -> list[str]:
    """Return the excluded nodes that no earlier requeue of this job added."""
    ours: set[str] = set()
    for event in state.of_kind(Excluded):
        if event.attempt and event.attempt.job == attempt.job:
            ours.update(event.hosts or [])
    return sorted(node for node in excluded if node not in ours)


def _nodes_of(state: State, attempt: Attempt) -> int:
    mine = state.of(attempt).events
    reported = [one.nodes for one in mine if isinstance(one, Submitted | Opened | Started)]
    counted = [count for count in reported if isinstance(count, int)]
    given = os.environ.get("SLURM_JOB_NUM_NODES", "")
    return max([1, *counted, *([int(given)] if given.isdecimal() else [])])


def _least_nodes(state: State) -> int | None:
    """Return the smallest number of nodes of a job with a range of ``job.nodes``; None without a range."""
    submitted = state.newest(Submitted)
    least, dash, _ = str(submitted.nodes if submitted else "").partition("-")
    return int(least) if dash and least.isdecimal() else None


def _print(line: str) -> None:
    print(f"hpcrun: {line}", file=sys.stderr, flush=True)
