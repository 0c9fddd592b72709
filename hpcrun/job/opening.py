"""The beginning of an attempt: close the previous attempt, ask the policy, and take ownership.

sbatch passes the environment of its caller on. Inside another job this environment contains options that srun
would obey, for example a request for GPUs in a job that has none. Slurm sets most variables again for each
job, but the variable of an option only if the option was given. So the controller is asked for the options of
this job.
"""

import os
import re
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hpcrun.diagnose.read_log import scheduler_word
from hpcrun.errors import UserError
from hpcrun.job.finalize import with_lost_announcement, write_result
from hpcrun.job.history import (
    AttemptRecord,
    all_histories,
    asked_to_end,
    finished_before,
    histories,
    jobs_of,
    last_committed,
)
from hpcrun.job.ownership import Occupied, require_free, same_number
from hpcrun.job.policy import Budgets, decide
from hpcrun.job.scheduler_view import batch_log
from hpcrun.run.directory import RunDirectory
from hpcrun.run.endings import read_hang
from hpcrun.run.events import Attempt, Cause, Event, read_events, record_event
from hpcrun.run.files import read_json, read_lines
from hpcrun.run.record import claim
from hpcrun.slurm.avoided_nodes import record_dead_nodes


class Refused(UserError):
    """The restart policy allows this run no further attempt."""


def already_finished(run: RunDirectory, attempt: Attempt) -> bool:
    """Return True if an earlier start of this job has finished the run, so that all ranks exit with code 0.

    Each rank checks this before rank 0 opens the attempt; otherwise the other ranks would wait for rank 0.
    """
    if attempt.restart == 0 or (read_json(run.result) or {}).get("state") != "finished":
        return False
    return finished_before(read_events(run), attempt)


def open_attempt(run: RunDirectory, attempt: Attempt, budgets: Budgets, **facts: Any) -> None:
    """Make ``attempt`` the run's owner and log that it begins. Called once, by rank 0.

    An earlier attempt without a recorded end lost its node, unless Slurm's messages in its batch log
    give another reason: the attempt itself could not record one.

    Raises:
        Occupied: another job has the run.
        Refused: a budget is used up, and result.json says which; or this attempt was opened before.
        OSError: the run directory cannot be written.
    """
    if facts.get("executor") == "slurm":
        require_free(run, attempt)
        _require_new(run, attempt)
    events = with_lost_announcement(run)
    for record in all_histories(events):
        if record.cause is None and record.attempt != attempt:
            cause, reason = _end_of(run, events, record, attempt)
            if cause is Cause.NODE_FAILURE:
                _blame_nodes(run, events, record)
            record_event(
                run,
                "ended",
                attempt=record.attempt,
                cause=cause.value,
                step=record.committed,
                reason=reason,
                last_seen=_last_sign(run, events, record),
                # For another job, a person has requested the next start.
                restart_allowed=record.attempt.job in jobs_of(events, attempt.job),
            )
    # Another job is another submission by a person and starts with fresh budgets.
    chain = jobs_of(events, attempt.job)
    history = [record for record in histories(read_events(run)) if record.attempt.job in chain]
    # After a start that finished, only the result is missing: this start writes it again.
    if history and history[-1].cause not in (None, Cause.FINISHED):
        decision = decide(history, budgets)
        if not decision.restart:
            events = read_events(run)
            record_event(run, "refused", attempt=attempt, reason=decision.reason)
            write_result(run, history[-1].cause, "", decision.reason, last_committed(events))
            raise Refused(f"{run.name}: not started again: {decision.reason}")
    claim(run, attempt)
    if not history:
        # The result of an earlier job: `submit` removes it, sbatch by hand does not.
        run.result.unlink(missing_ok=True)
    cluster = os.environ.get("SLURM_CLUSTER_NAME")
    place = {"cluster": cluster} if cluster else {}
    told: dict[str, Any] = {"host": socket.gethostname(), **place, **facts}
    record_event(run, "opened", attempt=attempt, **told)


def _require_new(run: RunDirectory, attempt: Attempt) -> None:
    """Raise Refused if an earlier srun of the same allocation (salloc) has opened this attempt.

    Files of that step (the rendezvous of the ranks, failures) would be mistaken for files of this step.

    Raises:
            Occupied: the attempt belongs to a job of another cluster with the same number.
    """
    here = os.environ.get("SLURM_CLUSTER_NAME")
    for event in read_events(run):
        if event.what != "opened" or event.attempt != attempt:
            continue
        there = event.fields.get("cluster", here)
        if there != here:
            raise Occupied(same_number(run, attempt.job, str(there)))
        raise Refused(
            f"{run.name}: attempt {attempt.owner} has run before in this allocation; start the next attempt "
            f"with SLURM_RESTART_COUNT={attempt.restart + 1} in front of srun, or submit the run"
        )


def _end_of(
    run: RunDirectory, events: Sequence[Event], record: AttemptRecord, successor: Attempt
) -> tuple[Cause, str]:
    mine = [event for event in events if event.attempt == record.attempt]
    if any(event.what == "finished" for event in mine):
        return Cause.FINISHED, "finished"
    word = scheduler_word(batch_log(run, record.attempt))
    words = ["preemption", "time-limit"]
    # A job that Slurm starts again was not cancelled.
    if record.attempt.job != successor.job:
        words.append("cancelled")
        word = "cancelled" if asked_to_end(events, record.attempt) else word
    if word in words:
        return Cause(word), f"{word}; killed before it could record its end"
    hang = read_hang(run.attempt_logs(record.attempt.job, record.attempt.restart))
    if hang is not None:
        return Cause.HANG, hang.line
    return (
        Cause.NODE_FAILURE,
        "ended without an exit record: its node failed, or all its processes died together",
    )


def _blame_nodes(run: RunDirectory, events: Sequence[Event], record: AttemptRecord) -> None:
    """Record the nodes of an attempt that Slurm reports as down."""
    for event in events:
        hosts = event.fields.get("hosts")
        if event.what == "opened" and event.attempt == record.attempt and hosts:
            try:
                dead = record_dead_nodes(str(hosts), str(run.path), record.attempt.owner)
            except OSError as error:
                print(f"hpcrun: the bad-node list is not written: {error}", file=sys.stderr)
                continue
            if dead:
                print(f"hpcrun: down since the previous attempt: {', '.join(dead)}", flush=True)


def _last_sign(run: RunDirectory, events: Sequence[Event], record: AttemptRecord) -> float:
    """Return the last time (Unix seconds) at which an attempt without a recorded end was known to run."""
    told = [event.time for event in events if event.attempt == record.attempt]
    logged = [
        line["time"]
        for line in read_lines(run.metrics)
        if line.get("restart") == record.attempt.restart and line.get("time", 0.0) >= record.started
    ]
    return float(max([record.started, *told, *logged]))


# A kind may begin with a digit (2080ti), or be a number (4090).
_KIND_AND_COUNT = r"(?P<kind>[^:=/,(\s]+)[:=])?(?P<count>\d+)(?![\w.:=-])"
_GPUS = re.compile(rf"gpu[:/=](?:{_KIND_AND_COUNT}")
_COUNT = re.compile(rf"(?:{_KIND_AND_COUNT}")

# Variables of another step, and choices that hpcrun or the step makes itself, such as the exported variables.
_NEVER = ("SLURM_STEP", "SLURM_MEM_", "SLURM_CPU_BIND", "SLURM_EXPORT_ENV")
# A person may set these two for srun. In a task Slurm sets them together with a variable that ends in _TYPE.
_BINDINGS = ("SLURM_CPU_BIND", "SLURM_MEM_BIND")
_RANK = frozenset({"RANK", "LOCAL_RANK", "WORLD_SIZE"})
# Only a task of srun has these.
_OF_A_TASK = frozenset(
    {"SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS", "SLURM_SRUN_COMM_HOST", "SLURM_SRUN_COMM_PORT"}
)
_TASKS = frozenset({"SLURM_NTASKS", "SLURM_NPROCS"})
# Slurm sets these for every batch script, independent of its options.
_OF_A_JOB = re.compile(
    r"SLURM_(?:CONF|CLUSTER_NAME|JOBID|JOB_\w+|NNODES|NODELIST|NODEID|PROCID|LOCALID|GTIDS|NODE_ALIASES"
    r"|TASKS_PER_NODE|CPUS_ON_NODE|GPUS_ON_NODE|SUBMIT_\w+|TASK_PID|TOPOLOGY_\w+|RESTART_COUNT"
    r"|ARRAY_\w+|HET_\w+|PRIO_PROCESS|WORKING_CLUSTER|SCRIPT_CONTEXT|OOM_KILL_STEP|PROTOCOL_VERSION)"
)


def own_variables(environ: Mapping[str, str], job: Mapping[str, str]) -> dict[str, str]:
    """Return ``environ`` without the variables of another job.

    Args:
        environ: the environment of the batch script.
        job: the fields of ``scontrol show job``; empty if no controller answers; then only variables
            that no batch script has are dropped.
    """
    own = {
        name: value
        for name, value in environ.items()
        if name not in _RANK and (not name.startswith(_NEVER) or _is_own_binding(name, environ))
    }
    if not job:
        return own
    stale = {name for name in own if name in _TRUE and not _TRUE[name](own[name], job)}
    # A different number of tasks does not prove that the variables are of another job: this job may request
    # its tasks by options that its number of tasks does not show.
    if stale - _TASKS or not _OF_A_TASK.isdisjoint(environ):
        stale |= {name for name in own if _is_an_option(name) and name not in _TRUE}
    else:
        stale = set()
    for name in stale:
        del own[name]
    cores = job.get("CPUs/Task", "")
    if "SLURM_CPUS_PER_TASK" in stale and cores.isdecimal() and cores != "1":
        # Slurm allocates more cores than requested if a task needs the memory of these cores.
        own["SLURM_CPUS_PER_TASK"] = cores
    if job.get("Restarts", "").isdecimal() and ("SLURM_RESTART_COUNT" in own):
        own["SLURM_RESTART_COUNT"] = job["Restarts"]
    return own


def _is_own_binding(name: str, environ: Mapping[str, str]) -> bool:
    """Return True if a person has set a binding (``export SLURM_CPU_BIND=cores`` in the batch script)."""
    inherited = f"{name}_TYPE" in environ or not _OF_A_TASK.isdisjoint(environ)
    return name in _BINDINGS and not inherited


def _is_an_option(name: str) -> bool:
    return name.startswith("SLURM_") and not _OF_A_JOB.fullmatch(name)


def _gpus_in(field: str) -> Callable[[str, Mapping[str, str]], bool]:
    def holds(value: str, job: Mapping[str, str]) -> bool:
        granted = {(found["kind"], found["count"]) for found in _GPUS.finditer(job.get(field, ""))}
        return {(found["kind"], found["count"]) for found in _COUNT.finditer(value)} <= granted

    return holds


def _is(field: str) -> Callable[[str, Mapping[str, str]], bool]:
    """Return True if ``field`` begins with the variable's number; True if Slurm does not show the field."""

    def holds(value: str, job: Mapping[str, str]) -> bool:
        shown = re.match(r"\d+", job.get(field, ""))
        return shown is None or shown.group() == value

    return holds


def _shown(field: str) -> Callable[[str, Mapping[str, str]], bool]:
    return lambda _, job: field in job


def _has_gpus(_: str, job: Mapping[str, str]) -> bool:
    return any(
        name.startswith(("Tres", "TRES", "AllocTRES")) and "gpu" in job[name] for name in job
    )


_TRUE: dict[str, Callable[[str, Mapping[str, str]], bool]] = {
    "SLURM_ARRAY_JOB_ID": _shown("ArrayJobId"),
    "SLURM_ARRAY_TASK_ID": _shown("ArrayJobId"),
    "SLURM_HET_SIZE": _shown("HetJobId"),
    "SLURM_HET_JOB_ID": _shown("HetJobId"),
    "SLURM_NTASKS": _is("NumTasks"),
    "SLURM_NPROCS": _is("NumTasks"),
    "SLURM_NTASKS_PER_NODE": _is("NtasksPerN:B:S:C"),
    "SLURM_CPUS_PER_TASK": _is("CPUs/Task"),
    "SLURM_GPUS": _gpus_in("TresPerJob"),
    "SLURM_GPUS_PER_NODE": _gpus_in("TresPerNode"),
    "SLURM_GPUS_PER_SOCKET": _gpus_in("TresPerSocket"),
    "SLURM_GPUS_PER_TASK": _gpus_in("TresPerTask"),
    "SLURM_GPUS_ON_NODE": _has_gpus,
    "SLURM_JOB_GPUS": _has_gpus,
}
