"""Record a node that failed an attempt, and exclude nodes that fail often from the next attempt."""

import os
import sys
from collections.abc import Collection, Mapping, Sequence
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
    take_back_if_stuck,
)


def exclude_bad_nodes(
    runs: Sequence[RunDirectory],
    attempt: Attempt,
    classifications: Sequence[Classification],
    *,
    after: int | None,
    hours: float,
    waiting: str | None = None,
) -> None:
    """Exclude bad nodes from the next start of a pending job (Slurm refuses to change a running job).

    Args:
        runs: the runs of the job; several share it with ``--pack``.
        attempt: the attempt that has ended.
        classifications: the classified end of each run.
        waiting: the pending job; None: the job of ``attempt``.
        after: number of failures from which a node is excluded; None: never.
        hours: only failures of the last ``hours`` hours count.
    """
    job = waiting or attempt.job
    shown = slurm.run(slurm.scontrol_show_job_command(job))
    if shown.returncode != 0:
        return
    facts = slurm.parse_show_job(shown.stdout)
    events = [read_events(run) for run in runs]
    request = request_of(facts, max(_nodes_of(one, attempt) for one in events))
    least = _least_nodes(events[0])
    if least is not None:
        request = replace(request, nodes=least)
    found = [
        classification.diagnosis for classification in classifications if classification.diagnosis
    ]
    unfit = [node for diagnosis in found for node in diagnosis.unfit]
    bad = nodes_to_avoid(request, after=after, hours=hours, unfit=unfit)
    if not bad:
        return
    given = _given_by_the_user(runs, attempt, excluded_nodes(facts))
    reported = slurm.run(slurm.scontrol_exclude_command(job, [*given, *bad]))
    if reported.returncode != 0:
        words = " ".join(reported.stderr.split())
        _print(f"cannot exclude {', '.join(bad)}: {words}")
        return
    _note_excluded(runs, attempt, hosts=bad)
    _print(f"excludes {', '.join(bad)}: {'unfit, or ' if unfit else ''}failed too often")
    reason = take_back_if_stuck(job, given)
    if reason is not None:
        _note_excluded(runs, attempt, hosts=[], reason=reason)
        _print(
            f"the exclusion of nodes is withdrawn, because Slurm has no other node for the job ({reason})"
        )


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


def _note_excluded(runs: Sequence[RunDirectory], attempt: Attempt, **facts: object) -> None:
    for run in runs:
        note(run, "excluded", attempt, **facts)


def _given_by_the_user(
    runs: Sequence[RunDirectory], attempt: Attempt, excluded: Collection[str]
) -> list[str]:
    """Return the excluded nodes that no earlier requeue of this job added."""
    ours: set[str] = set()
    for event in (event for run in runs for event in read_events(run)):
        if event.what == "excluded" and event.attempt and event.attempt.job == attempt.job:
            ours.update(event.fields.get("hosts", []))
    return sorted(node for node in excluded if node not in ours)


def _nodes_of(
    events: Sequence[Event], attempt: Attempt, environ: Mapping[str, str] = os.environ
) -> int:
    """Return the number of nodes that the attempt had."""
    reported = [event.fields.get("nodes") for event in events if event.attempt == attempt]
    counted = [count for count in reported if isinstance(count, int)]
    given = environ.get("SLURM_JOB_NUM_NODES", "")
    return max([1, *counted, *([int(given)] if given.isdecimal() else [])])


def _least_nodes(events: Sequence[Event]) -> int | None:
    """Return the smallest number of nodes of a job with a range of ``job.nodes``; None without a range."""
    submitted = [event.fields.get("nodes") for event in events if event.what == "submitted"]
    least, dash, _ = str(submitted[-1] if submitted else "").partition("-")
    return int(least) if dash and least.isdecimal() else None


def _print(line: str) -> None:
    print(f"hpcrun: {line}", file=sys.stderr, flush=True)
