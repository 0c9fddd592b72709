"""The end time of this job, so that every rank can stop before Slurm kills it.

The end moves: an administrator extends a limit, or a preemption brings it forward to the end of the
grace period. So callers ask the controller again from time to time with ``query_end_time``.
"""

import re
from collections.abc import Callable, Mapping

from hpcrun import slurm
from hpcrun.errors import ClusterError
from hpcrun.ranks.launchers import in_local_cluster, job_id

_SECONDS = re.compile(r"[0-9]+(?:\.[0-9]+)?")


def query_end_time(job: str) -> float | None:
    """Ask the controller for the job's end in Unix seconds. It may take 10 s: not within a step.

    Returns None if the job has no time limit, is unknown, or the controller does not answer: the
    rank then continues with the previous answer.
    """
    answer = slurm.run(slurm.squeue_command([job]))
    jobs = slurm.parse_squeue(answer.stdout)
    # A heterogeneous job is queried by its leader's id, and listed by component.
    info = jobs.get(job) or jobs.get(f"{job}+0")
    return None if info is None or info.state == "PENDING" else info.end_time


def end_time(
    environ: Mapping[str, str], query: Callable[[str], float | None] = query_end_time
) -> float | None:
    """Return the end of this process's job in Unix seconds, None without a limit or a job.

    SLURM_JOB_END_TIME contains it since Slurm 23.02 and in the local cluster; older versions are queried.

    Args:
        environ: the environment of this rank.
        query: returns the end for a job's id; tests replace it.

    Raises:
        ClusterError: SLURM_JOB_END_TIME is not a number.
    """
    given = environ.get("SLURM_JOB_END_TIME", "").strip()
    if given:
        if not _SECONDS.fullmatch(given):
            raise ClusterError(
                f"SLURM_JOB_END_TIME is {given!r}: expected Unix seconds; unset it to have "
                "Slurm asked instead"
            )
        return float(given)
    job = job_id(environ)
    if job is None or in_local_cluster(environ):
        return None
    return query(job)
