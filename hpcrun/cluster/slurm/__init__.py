"""Slurm's programs: pure functions that build commands and parse output, and one function that runs them.

Slurm's texts differ between versions and sites, so all code that depends on them is in this package.
Each name is imported at its first use: a command needs few of them, and a dry run hardly any.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpcrun.cluster.slurm.answers import (
        JobInfo,
        JobRecord,
        parse_job_states,
        parse_sacct,
        parse_sbatch,
        parse_show_job,
        parse_sinfo,
        parse_squeue,
        parse_steps,
    )
    from hpcrun.cluster.slurm.commands import (
        sacct_command,
        sacct_usage_command,
        scancel_command,
        scontrol_depend_command,
        scontrol_exclude_command,
        scontrol_requeue_command,
        scontrol_show_config_command,
        scontrol_show_job_command,
        scontrol_show_nodes_command,
        scontrol_show_partitions_command,
        sinfo_command,
        squeue_command,
        squeue_dependents_command,
        squeue_scripts_command,
        squeue_steps_command,
    )
    from hpcrun.cluster.slurm.dependents import Dependent, parse_dependents, parse_scripts
    from hpcrun.cluster.slurm.programs import (
        NOT_FOUND,
        TIMED_OUT,
        Completed,
        cluster_name,
        configured,
        parse_cluster_name,
        run,
    )
    from hpcrun.cluster.slurm.reasons import reason_in_words
    from hpcrun.cluster.slurm.refusals import RequeueError, classify_requeue_error, is_unknown_job
    from hpcrun.cluster.slurm.usage import AttemptUsage, parse_sacct_usage
    from hpcrun.cluster.slurm.values import seconds, unix_time

__all__ = [
    "NOT_FOUND",
    "TIMED_OUT",
    "AttemptUsage",
    "Completed",
    "Dependent",
    "JobInfo",
    "JobRecord",
    "RequeueError",
    "classify_requeue_error",
    "cluster_name",
    "configured",
    "is_unknown_job",
    "parse_cluster_name",
    "parse_dependents",
    "parse_job_states",
    "parse_sacct",
    "parse_sacct_usage",
    "parse_sbatch",
    "parse_scripts",
    "parse_show_job",
    "parse_sinfo",
    "parse_squeue",
    "parse_steps",
    "reason_in_words",
    "run",
    "sacct_command",
    "sacct_usage_command",
    "scancel_command",
    "scontrol_depend_command",
    "scontrol_exclude_command",
    "scontrol_requeue_command",
    "scontrol_show_config_command",
    "scontrol_show_job_command",
    "scontrol_show_nodes_command",
    "scontrol_show_partitions_command",
    "seconds",
    "sinfo_command",
    "squeue_command",
    "squeue_dependents_command",
    "squeue_scripts_command",
    "squeue_steps_command",
    "unix_time",
]

_HOMES = {
    "Completed": "programs",
    "Dependent": "dependents",
    "JobInfo": "answers",
    "JobRecord": "answers",
    "NOT_FOUND": "programs",
    "RequeueError": "refusals",
    "TIMED_OUT": "programs",
    "AttemptUsage": "usage",
    "classify_requeue_error": "refusals",
    "cluster_name": "programs",
    "configured": "programs",
    "is_unknown_job": "refusals",
    "parse_cluster_name": "programs",
    "parse_dependents": "dependents",
    "parse_job_states": "answers",
    "parse_sacct": "answers",
    "parse_sacct_usage": "usage",
    "parse_sbatch": "answers",
    "parse_scripts": "dependents",
    "parse_show_job": "answers",
    "parse_sinfo": "answers",
    "parse_squeue": "answers",
    "parse_steps": "answers",
    "reason_in_words": "reasons",
    "run": "programs",
    "sacct_command": "commands",
    "sacct_usage_command": "commands",
    "scancel_command": "commands",
    "scontrol_depend_command": "commands",
    "scontrol_exclude_command": "commands",
    "scontrol_requeue_command": "commands",
    "scontrol_show_config_command": "commands",
    "scontrol_show_job_command": "commands",
    "scontrol_show_nodes_command": "commands",
    "scontrol_show_partitions_command": "commands",
    "seconds": "values",
    "sinfo_command": "commands",
    "squeue_command": "commands",
    "squeue_dependents_command": "commands",
    "squeue_scripts_command": "commands",
    "squeue_steps_command": "commands",
    "unix_time": "values",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
