"""Record a node that failed an attempt, and exclude nodes that fail often from the next attempt."""

import os
import sys
from collections.abc import Collection, Sequence
from dataclasses import replace

from hpcrun import slurm
from hpcrun.diagnose.causes import blames_node
from hpcrun.job.finalize import Classification
from hpcrun.run.directory import RunDirectory
from hpcrun.run.events import Attempt, Cause, Event, note, read_events
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
    events = read_events(run)
    request = request_of(facts, _nodes_of(events, attempt))
    least = _least_nodes(events)
    if least is not None:
        request = replace(request, nodes=least)
    found = classification.diagnosis
    unfit = found.unfit if found else ()
    bad = nodes_to_avoid(request, after=after, hours=hours, unfit=unfit)
    if not bad:
        return
    given = _given_by_the_user(events, attempt, excluded_nodes(facts))
    reported = slurm.run(slurm.scontrol_exclude_command(waiting, [*given, *bad]))
    if reported.returncode != 0:
        words = " ".join(reported.stderr.split())
        _print(f"cannot exclude {', '.join(bad)}: {words}")
        return
    note(run, "excluded", attempt, hosts=bad)
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


def _given_by_the_user(
    events: Sequence[Event], attempt: Attempt, excluded: Collection[str]
) -> list[str]:
    """Return the excluded nodes that no earlier requeue of this job added."""
    ours: set[str] = set()
    for event in events:
        if event.what == "excluded" and event.attempt and event.attempt.job == attempt.job:
            ours.update(event.fields.get("hosts", []))
    return sorted(node for node in excluded if node not in ours)


def _nodes_of(events: Sequence[Event], attempt: Attempt) -> int:
    reported = [event.fields.get("nodes") for event in events if event.attempt == attempt]
    counted = [count for count in reported if isinstance(count, int)]
    given = os.environ.get("SLURM_JOB_NUM_NODES", "")
    return max([1, *counted, *([int(given)] if given.isdecimal() else [])])


def _least_nodes(events: Sequence[Event]) -> int | None:
    """Return the smallest number of nodes of a job with a range of ``job.nodes``; None without a range."""
    submitted = [event.fields.get("nodes") for event in events if event.what == "submitted"]
    least, dash, _ = str(submitted[-1] if submitted else "").partition("-")
    return int(least) if dash and least.isdecimal() else None


def _print(line: str) -> None:
    print(f"hpcrun: {line}", file=sys.stderr, flush=True)
