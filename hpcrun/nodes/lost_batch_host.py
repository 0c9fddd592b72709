"""The requeue of a job with spare nodes that has lost the node of its batch script.

Observed with Slurm 22.05 and 26.05: a job with ``--no-kill`` stays RUNNING without its batch script, until
its time limit. The controller then no longer lists the batch host among the job's nodes.
"""

from collections.abc import Mapping

from hpcrun import slurm
from hpcrun.errors import ClusterError
from hpcrun.ranks.launchers import job_id
from hpcrun.slurm.notation import expand


def requeue_without_batch_host(node: str, environ: Mapping[str, str]) -> bool:
    """Requeue a job that Slurm keeps although the node of its batch script is lost; return True if so.

    Slurm does this itself for a job without ``--no-kill``. Of several agents only the first node's acts, and
    only on Slurm's own statement.
    """
    job = job_id(environ) or ""
    shown = slurm.run(slurm.scontrol_show_job_command(job))
    facts = slurm.parse_show_job(shown.stdout) if shown.returncode == 0 else {}
    if not must_requeue(node, facts, environ.get("SLURM_RESTART_COUNT") or "0"):
        return False
    return slurm.run(slurm.scontrol_requeue_command(job)).returncode == 0


def must_requeue(node: str, facts: Mapping[str, str], restarts: str) -> bool:
    """Return True if the job runs without its batch host and ``node`` is the first of its nodes.

    Args:
        facts: the fields of ``scontrol show job``.
        restarts: the restart count of the agent's own start.
    """
    try:
        left = expand(facts.get("NodeList", ""))
    except ClusterError:
        return False
    same = facts.get("JobState") == "RUNNING" and facts.get("Restarts") == restarts
    return same and "BatchHost" in facts and facts["BatchHost"] not in left and left[0] == node
