"""A second start on other nodes after a failed first start, if the reason may concern only some nodes.

A line of the set-up, the interpreter, a container, a module or a file may be missing on a single node. After
days in the queue, a second start costs minutes. If the second start fails too, the input is bad.
"""

import os
from collections.abc import Mapping, Sequence

from hpcrun import slurm
from hpcrun.diagnose.causes import CERTAIN, is_cascade
from hpcrun.job.history import all_histories, jobs_of, of_script
from hpcrun.job.policy import START_SECONDS
from hpcrun.run.endings import Failure
from hpcrun.run.events import Attempt, Event
from hpcrun.slurm.avoided_nodes import (
    excluded_nodes,
    nodes_to_spare,
    request_of,
    take_back_if_stuck,
)
from hpcrun.slurm.notation import expand


def deserves_second_start(events: Sequence[Event], attempt: Attempt) -> bool:
    """Return True if ``attempt`` may be followed by a start on other nodes: no earlier start has worked.

    The starts of the jobs that this job continues count as well.
    """
    return not (tried_elsewhere(events, attempt) or has_worked(events, attempt))


def tried_elsewhere(events: Sequence[Event], attempt: Attempt) -> bool:
    """Return True if a start before ``attempt`` was followed by a start on other nodes."""
    chain = jobs_of(events, attempt.job)
    return any(
        event.what == "ended" and bool(event.fields.get("elsewhere"))
        for event in events
        # A file system error may have interrupted the classification after it recorded this attempt's end.
        if event.attempt is not None and event.attempt.job in chain and event.attempt != attempt
    )


def has_worked(events: Sequence[Event], attempt: Attempt) -> bool:
    """Return True if a start before ``attempt`` has trained, or has run a script for a minute."""
    chain = jobs_of(events, attempt.job)
    return any(
        record.begun_at is not None
        or record.progressed
        or _ran_long(events, record.attempt, record.ended)
        for record in all_histories(events)
        if record.attempt.job in chain and record.attempt != attempt
    )


def _ran_long(events: Sequence[Event], attempt: Attempt, end: float | None) -> bool:
    """Return True if the script of ``attempt`` had run for a minute at ``end``."""
    starts = [event.time for event in events if (event.what, event.attempt) == ("started", attempt)]
    if not starts or end is None or not of_script(events):
        return False
    return end - starts[-1] >= START_SECONDS


def may_be_of_a_node(
    events: Sequence[Event], attempt: Attempt, failures: Sequence[Failure], *, second: bool
) -> bool:
    """Return True if the error that ended ``attempt`` may be absent on other nodes.

    The first rank that fails ends the others, so their missing messages prove little.

    Args:
        failures: the records of its ranks, earliest first.
        second: a second start may be on other nodes.
    """
    mine = [event for event in events if event.attempt == attempt and event.what == "bad-input"]
    refusal = mine[-1].fields if mine else {}
    own = [failure for failure in failures if not is_cascade(failure)]
    kind = refusal.get("kind") if mine else (own[0].kind if own else None)
    if refusal.get("certain") or kind in CERTAIN:
        return False
    # All nodes of a run that has worked may lose the file server, and its only node may lose a mount.
    if has_worked(events, attempt):
        return True
    if refusal.get("shared"):
        return False
    # The last message of a script that has run for long may come from a program that the script called.
    if own and _ran_long(events, attempt, own[0].time):
        return True
    hosts = {failure.host for failure in own if failure.kind == kind} | {refusal.get("host")}
    return second and len(hosts - {None}) < nodes_of(events, attempt) > 1


def nodes_of(
    events: Sequence[Event], attempt: Attempt, environ: Mapping[str, str] = os.environ
) -> int:
    """Return the number of nodes that the attempt had."""
    told = [event.fields.get("nodes") for event in events if event.attempt == attempt]
    counted = [count for count in told if isinstance(count, int)]
    given = environ.get("SLURM_JOB_NUM_NODES", "")
    return max([1, *counted, *([int(given)] if given.isdecimal() else [])])


def start_elsewhere(
    job: str,
    facts: Mapping[str, str],
    environ: Mapping[str, str] = os.environ,
    *,
    first: str | None = None,
) -> list[str]:
    """Keep the pending ``job`` away from the nodes of its last start; return the excluded nodes.

    Enough nodes for the job always remain: in a small partition the second start may get some of the
    same nodes, or all of them.

    Args:
            facts: the fields of ``scontrol show job`` for the job.
            first: the node to exclude first.
    """
    hosts = expand(environ.get("SLURM_JOB_NODELIST", ""))
    hosts.sort(key=lambda host: host != first)
    nodes = nodes_to_spare(hosts, request_of(facts, len(hosts)))
    if not nodes:
        return []
    given = sorted(excluded_nodes(facts))
    changed = slurm.run(slurm.scontrol_exclude_command(job, [*given, *nodes]))
    if changed.returncode != 0 or take_back_if_stuck(job, given) is not None:
        return []
    return nodes
