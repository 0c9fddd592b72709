"""Several runs of a sweep in one job (``--pack``): the refused options, and the request of the shared job."""

from collections.abc import Sequence

from hpcrun.config import Config, Job
from hpcrun.errors import UserError


def require_packable(configs: Sequence[Config], pack: int, at_once: int | None) -> None:
    """Return if ``pack`` runs with these configs can share one node.

    Args:
        at_once: the most runs at the same time; None: no limit.

    Raises:
        UserError: a run has several tasks or nodes, or commands to run before its ranks.
    """
    if at_once is not None and at_once < pack:
        raise UserError(f"--max-parallel {at_once}: is less than --pack {pack}; raise it")
    for job in {config.job.model_dump_json(): config.job for config in configs}.values():
        if (why := _unpackable(job)) is not None:
            raise UserError(f"--pack {pack}: {why}")


def shared_job(job: Job, pack: int, alone: Job | None = None) -> Job:
    """Return the request of the job that ``pack`` runs with the request ``job`` share.

    Args:
        alone: the request of a single run, if ``job`` is already the request of a shared job.
    """
    tasks = (alone or job).tasks_per_node if pack == 1 else pack
    return job.model_copy(update={"tasks_per_node": tasks})


def groups(numbers: Sequence[int], pack: int, at_once: int | None) -> list[tuple[list[int], int]]:
    """Return the elements with these numbers in groups, each with the number of runs that share a job.

    All jobs of an array have the same request, so the elements that do not fill a job get a separate array.
    With a limit (``at_once``) that array would wait for the end of the first, so there is only one group.
    """
    ordered = sorted(numbers)
    filling = len(ordered) - len(ordered) % pack
    if filling == 0:
        return [(ordered, len(ordered))]
    if filling == len(ordered) or at_once is not None:
        return [(ordered, pack)]
    return [(ordered[:filling], pack), (ordered[filling:], len(ordered) - filling)]


def _unpackable(job: Job) -> str | None:
    """Return the reason why runs with this request cannot share a job; None: they can."""
    if job.nodes != 1:
        return f"a packed run has one node, and job.nodes is {job.nodes}; use --nodes 1, or omit --pack"
    if job.launcher is not None:
        return f"a packed run has one task, and {job.launcher} starts several; omit one of the two"
    if job.tasks_on_node != 1:
        return (
            f"a packed run has one task, and the config requests {job.tasks_on_node}; use --gpus 1, or "
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
