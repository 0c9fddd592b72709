"""Several runs of a sweep in one job: what such a run may not have, and the request of the shared job."""

from collections.abc import Sequence

from hpcrun.config import Config, Job
from hpcrun.errors import UserError


def require_packable(configs: Sequence[Config], pack: int, at_once: int | None) -> None:
    """Return if ``pack`` runs with these configs can share one node.

    Args:
        at_once: the most runs at the same time; None: no limit.

    Raises:
        UserError: a run has several tasks or nodes, or steps of its own before its ranks.
    """
    if at_once is not None and at_once < pack:
        raise UserError(f"--max-parallel {at_once}: is less than --pack {pack}; raise it")
    for job in {config.job.model_dump_json(): config.job for config in configs}.values():
        if (why := _unpackable(job)) is not None:
            raise UserError(f"--pack {pack}: {why}")


def shared_job(job: Job, pack: int) -> Job:
    """Return the request of the job that ``pack`` runs with the request ``job`` share."""
    return job if pack == 1 else job.model_copy(update={"tasks_per_node": pack})


def _unpackable(job: Job) -> str | None:
    """Return the reason why runs with this request cannot share a job; None: they can."""
    if job.nodes != 1:
        return f"a packed run has one node, and job.nodes is {job.nodes}; use --nodes 1, or omit --pack"
    if job.launcher is not None:
        return f"a packed run has one task, and {job.launcher} starts several; omit one of the two"
    if job.tasks_on_node != 1:
        return (
            f"a packed run has one task, and the config asks for {job.tasks_on_node}; use --gpus 1, or "
            "--tasks-per-node 1"
        )
    if job.gpu_request == "gpus-per-task":
        return "job.gpu_request=gpus-per-task gives no GPU to share; use gpus-per-node or gres"
    for key in ("preflight", "node_setup"):
        if getattr(job, key):
            return (
                f"job.{key} is for a whole job, and these runs share one; use job.setup, or omit it"
            )
    return None
