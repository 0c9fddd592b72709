"""A new step in the allocation of a job: its obstacles, and the end of the step before.

A new step needs no queue and no requeue delay. It is possible while the job runs, all of its nodes live, and
enough of the time limit is left.
"""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass

from hpcrun import slurm
from hpcrun.job.finalize import Classification
from hpcrun.job.scheduler_view import EARLY, JobView, batch_log, view_of
from hpcrun.run.attempt import Attempt
from hpcrun.run.directory import RunDirectory
from hpcrun.run.journal.journal import Journal
from hpcrun.slurm.avoided_nodes import nodes_to_avoid, request_of
from hpcrun.slurm.notation import expand

# Slurm would start a step on a draining node, but somebody wants the node empty.
_DEAD = ("DOWN", "FAIL", "DRAIN", "NOT_RESPONDING", "POWER", "REBOOT")
# Seconds. srun itself waits until KillWait is over, so what is left then cannot be killed.
_STEP_END, _LOOK = 20.0, 0.1


@dataclass(frozen=True)
class Allocation:
    """The job at the end of an attempt.

    ``view``: the controller's answer. ``nodes``: those that Slurm counts as the job's. ``dead``: its nodes
    that are down. ``avoided``: its nodes that the next start must exclude.
    """

    view: JobView | None
    nodes: Sequence[str] = ()
    dead: Sequence[str] = ()
    avoided: Sequence[str] = ()


def allocation_obstacle(attempt: Attempt, job: Allocation, now: float, lead: float) -> str | None:
    """Return why the job cannot start another step; None if it can.

    Args:
        now: Unix seconds.
        lead: seconds from the warning signal to the time limit.
    """
    view = job.view
    if view is None:
        return "the controller does not answer"
    if view.state != "RUNNING" or view.restarts != attempt.restart:
        return f"the job is {view.state or 'in an unknown state'}"
    if view.preempted:
        return "the job is being preempted"
    if view.end_time is not None and view.end_time - now < lead + EARLY:
        return "the time limit is near"
    if job.dead:
        return f"{', '.join(job.dead)} is down"
    if job.avoided:
        return f"{', '.join(job.avoided)} failed too often"
    return None


def read_allocation(
    attempt: Attempt, ended: Classification, *, after: int | None, hours: float
) -> Allocation:
    """Ask Slurm for the job of ``attempt`` and its nodes.

    Args:
        ended: the end of the attempt.
        after: number of failures from which a node is excluded; None: never.
        hours: only failures of the last ``hours`` hours count.
    """
    shown = slurm.run(slurm.scontrol_show_job_command(attempt.job))
    if shown.returncode != 0:
        return Allocation(None)
    facts = slurm.parse_show_job(shown.stdout)
    nodes = facts.get("NodeList", "")
    hosts = expand(nodes) if nodes and facts.get("JobState") == "RUNNING" else []
    unfit = ended.diagnosis.unfit if ended.diagnosis else ()
    bad = nodes_to_avoid(request_of(facts), after=after, hours=hours, unfit=unfit)
    avoided = [node for node in hosts if node in bad]
    return Allocation(view_of(facts), hosts, dead_nodes(hosts) if hosts else [], avoided)


_LAUNCH = re.compile(r"^srun: error: (?:Application launch failed|Unable to create step)", re.M)


def was_launched(run: RunDirectory, attempt: Attempt) -> bool:
    """Return True if Slurm has started all tasks of ``attempt``, as far as files can be read."""
    try:
        if Journal(run).read().has_opened(attempt):
            return True
        logs = run.attempt_logs(attempt)
        started = any(logs.glob("rank-*.log"))
    except OSError:
        return True
    return started and not _LAUNCH.search(batch_log(run, attempt))


def dead_nodes(hosts: Sequence[str]) -> list[str]:
    """Return those of ``hosts`` on which Slurm starts no step, as far as the controller answers."""
    listed = slurm.run(slurm.sinfo_command(hosts=hosts))
    states = slurm.parse_sinfo(listed.stdout) if listed.returncode == 0 else {}
    return [
        node
        for node, state in states.items()
        if state.upper().startswith(_DEAD) or state.endswith("*")
    ]


def end_step(attempt: Attempt, name: str) -> str | None:
    """AttemptEnd what is left of the step ``name``; return None after its end, otherwise the obstacle.

    A rank that survives its srun would keep the GPUs, and Slurm starts no step on them.
    """
    late = time.monotonic() + _STEP_END
    asked = False
    while True:
        listed = slurm.run(slurm.squeue_steps_command(attempt.job))
        if listed.returncode != 0:
            return "the steps of the job are not known"
        steps = slurm.parse_steps(listed.stdout, name)
        if not steps:
            return None
        if time.monotonic() > late:
            return f"step {attempt.job}.{steps[0]} does not end"
        if not asked:
            for step in steps:
                slurm.run(slurm.scancel_command(attempt.job, "KILL", step=step))
            asked = True
        time.sleep(_LOOK)
