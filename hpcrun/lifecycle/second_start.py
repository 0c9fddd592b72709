"""The rule for a first start that fails before it has ranks: the job starts once more, on other nodes.

A line of the set-up, the interpreter or a container may be missing on a single node. After days in the
queue, a second start costs minutes. If it fails too, the input is bad.
"""

import os
from collections.abc import Mapping, Sequence

from hpcrun.cluster import slurm
from hpcrun.cluster.avoid import (
    excluded_nodes,
    nodes_to_spare,
    request_of,
    take_back_if_stuck,
)
from hpcrun.cluster.hostlist import expand
from hpcrun.lifecycle.history import jobs_of
from hpcrun.run.directory import RunDirectory
from hpcrun.run.events import Attempt, Event, note


def deserves_second_start(events: Sequence[Event], attempt: Attempt) -> bool:
    """Return whether no start of the job has ended or trained before ``attempt``.

    The starts of the jobs that this job continues count as well.
    """
    chain = jobs_of(events, attempt.job)
    return not any(
        event.what in ("ended", "opened")
        for event in events
        if event.attempt is not None
        and event.attempt.job in chain
        # An error of the file system may have cut off the judging after it wrote this attempt's end.
        and (event.what != "ended" or event.attempt != attempt)
    )


def start_elsewhere(
    run: RunDirectory,
    attempt: Attempt,
    job: str,
    facts: Mapping[str, str],
    environ: Mapping[str, str] = os.environ,
) -> list[str]:
    """Keep the pending ``job`` away from the nodes of ``attempt``; return the excluded nodes.

    Enough nodes for the job always remain: in a small partition the second start may get some of the
    same nodes, or all of them.

    Args:
        facts: what ``scontrol show job`` says of the job.
    """
    hosts = expand(environ.get("SLURM_JOB_NODELIST", ""))
    nodes = nodes_to_spare(hosts, request_of(facts, len(hosts)))
    if not nodes:
        return []
    given = sorted(excluded_nodes(facts))
    changed = slurm.run(slurm.scontrol_exclude_command(job, [*given, *nodes]))
    if changed.returncode != 0 or take_back_if_stuck(job, given) is not None:
        return []
    note(run, "excluded", attempt, hosts=nodes)
    return nodes
