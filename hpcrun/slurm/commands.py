"""Builders for the command lines of Slurm's programs. No function here runs a program.

``cluster`` is for ``--clusters``: another cluster than this host's.
"""

import re
from collections.abc import Sequence

from hpcrun.errors import ClusterError
from hpcrun.slurm.values import JOB_ID

_SIGNAL = re.compile(r"[A-Z0-9]+")
# The reason and the name come last, because users and sites choose their text. %e and %S are times.
_SQUEUE_FORMAT = "%i|%T|%N|%e,%S|%L|%r|%j"
_SACCT_FORMAT = "JobID,State,ExitCode,Start,End,NodeList"
SACCT_USAGE_FIELDS = (
    *("JobID", "State", "ElapsedRaw", "TimelimitRaw", "AllocCPUS", "TotalCPU", "NNodes"),
    *("AllocTRES", "MaxRSS", "NTasks", "TRESUsageInTot", "Start"),
)


def squeue_command(job_ids: Sequence[str], cluster: str | None = None) -> list[str]:
    """Build one query for all these jobs; Slurm remembers ended jobs for some minutes."""
    jobs = ",".join(_checked(job_id) for job_id in job_ids)
    return [
        "squeue",
        *_of(cluster),
        "--noheader",
        "--array",
        "--states=all",
        f"--format={_SQUEUE_FORMAT}",
        f"--jobs={jobs}",
    ]


def squeue_steps_command(job_id: str, cluster: str | None = None) -> list[str]:
    """Build the query for the steps of one job that have not ended, with their names."""
    job = _checked(job_id)
    return ["squeue", *_of(cluster), "--noheader", "--steps", "--format=%i|%j", f"--jobs={job}"]


def squeue_dependents_command() -> list[str]:
    """Build the query for the user's waiting jobs, with their dependencies and commands."""
    return ["squeue", "--noheader", "--me", "--states=PENDING", "--format=%i|%E|%o"]


def squeue_scripts_command(users: Sequence[int], cluster: str | None = None) -> list[str]:
    """Build the query for the jobs of these users that have not ended, with their batch scripts.

    An array is one job here.
    """
    names = ",".join(map(str, users))
    return ["squeue", *_of(cluster), "--noheader", f"--user={names}", "--format=%F|%o"]


def sacct_command(job_ids: Sequence[str], cluster: str | None = None) -> list[str]:
    """Build the query for every attempt of these jobs; without --duplicates only the last shows."""
    jobs = ",".join(_checked(job_id) for job_id in job_ids)
    return [
        "sacct",
        *_of(cluster),
        "--noheader",
        "--parsable2",
        "--allocations",
        "--duplicates",
        f"--format={_SACCT_FORMAT}",
        f"--jobs={jobs}",
    ]


def sacct_usage_command(job_ids: Sequence[str]) -> list[str]:
    """Build the query for the resources of these jobs, with all attempts and steps."""
    jobs = ",".join(_checked(job_id) for job_id in job_ids)
    return [
        "sacct",
        "--noheader",
        "--parsable2",
        "--noconvert",
        "--duplicates",
        f"--format={','.join(SACCT_USAGE_FIELDS)}",
        f"--jobs={jobs}",
    ]


def scontrol_requeue_command(job_id: str) -> list[str]:
    """Build the requeue of one job. It kills the job's processes: save first."""
    return ["scontrol", "requeue", _checked(job_id)]


def scontrol_show_job_command(
    job_id: str, cluster: str | None = None, *, as_json: bool = False
) -> list[str]:
    """Build the query for all that the controller knows of one job.

    JSON also has the state that COMPLETING hides; scontrol of 22.05 has no such option and refuses it.
    """
    form = ["--json"] if as_json else []
    return ["scontrol", *_of(cluster), "show", "job", _checked(job_id), *form]


def sinfo_command(hosts: Sequence[str] = ()) -> list[str]:
    """Build the query for the state of these nodes, or of all nodes."""
    named = [f"--nodes={','.join(hosts)}"] if hosts else []
    return ["sinfo", "--noheader", "--Node", "--format=%N|%T", *named]


def scontrol_exclude_command(job_id: str, hosts: Sequence[str]) -> list[str]:
    """Build the command that makes a pending job exclude these nodes; without nodes, exclude none."""
    return ["scontrol", "update", f"JobId={_checked(job_id)}", f"ExcNodeList={','.join(hosts)}"]


def scontrol_depend_command(job_id: str, dependency: str) -> list[str]:
    """Build the command that changes the jobs for which a pending job waits."""
    return ["scontrol", "update", f"JobId={_checked(job_id)}", f"Dependency={dependency}"]


def scancel_command(
    job_id: str,
    signal: str | None = None,
    *,
    step: int | None = None,
    cluster: str | None = None,
) -> list[str]:
    """Build the end of a job, or a signal (such as "USR2") to its steps, or to one ``step``.

    KILL is a signal only for a step: for a job, Slurm takes it as the command to end the job, with
    SIGTERM first.

    Raises:
            ClusterError: the job id or the signal is not valid.
    """
    argv = ["scancel", *_of(cluster)]
    if signal is not None:
        if not _SIGNAL.fullmatch(signal):
            raise ClusterError(f"signal {signal!r}: expected a name such as USR2 or TERM")
        argv.append(f"--signal={signal}")
    return [*argv, _checked(job_id) if step is None else f"{_checked(job_id)}.{step}"]


def scontrol_show_nodes_command(cluster: str | None = None) -> list[str]:
    """Build the query for all facts about the controller's nodes, one line each."""
    return ["scontrol", *_of(cluster), "--oneliner", "show", "nodes"]


def scontrol_show_partitions_command(cluster: str | None = None) -> list[str]:
    """Build the query for all partitions, one line each."""
    return ["scontrol", *_of(cluster), "--oneliner", "show", "partitions"]


def scontrol_show_config_command(cluster: str | None = None) -> list[str]:
    """Build the query for the cluster's configuration."""
    return ["scontrol", *_of(cluster), "show", "config"]


def _checked(job_id: str) -> str:
    if not JOB_ID.fullmatch(job_id):
        raise ClusterError(
            f"job id {job_id!r}: expected a number such as 123, or 123_4 of an array"
        )
    return job_id


def _of(cluster: str | None) -> list[str]:
    return [] if cluster is None else [f"--clusters={cluster}"]
