"""Slurm: the environment of its jobs, its commands and their output, and the submission of jobs.

Slurm's texts differ between versions and sites, so all code that depends on them is in this package.
No module of the package imports torch.
"""

from hpcrun.slurm.answers import (
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
from hpcrun.slurm.commands import (
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
from hpcrun.slurm.dependents import Dependent, parse_dependents, parse_scripts
from hpcrun.slurm.programs import (
    NOT_FOUND,
    TIMED_OUT,
    Completed,
    cluster_name,
    configured,
    parse_cluster_name,
    run,
)
from hpcrun.slurm.reasons import reason_in_words
from hpcrun.slurm.refusals import RequeueError, classify_requeue_error, is_unknown_job
from hpcrun.slurm.usage import AttemptUsage, parse_sacct_usage
from hpcrun.slurm.values import seconds, unix_time

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
