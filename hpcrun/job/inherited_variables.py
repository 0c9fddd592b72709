"""Slurm's variables of this job, without those of an enclosing job from which it was submitted.

sbatch passes the environment of its caller on. Inside another job this environment contains options that srun
would obey, for example a request for GPUs in a job that has none. Slurm sets most variables again for each
job, but the variable of an option only if the option was given. So the controller is asked for the options of
this job.
"""

import re
from collections.abc import Callable, Mapping

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
