"""The last act of a rank whose node was given up, while its run goes on elsewhere."""

import sys
from collections.abc import Mapping

from hpcrun.cluster.launchers import job_id, scheduler
from hpcrun.lifecycle import exitcodes
from hpcrun.lifecycle.history import successor
from hpcrun.run.directory import RunDirectory
from hpcrun.run.events import Attempt, read_events


def harmless_code(run: RunDirectory, environ: Mapping[str, str], code: int) -> int:
    """The exit code for a rank that would leave with ``code``: 0 where a newer attempt has the run.

    A failed task has srun end its step by name, and the newer attempt's step has the same name (seen
    with Slurm 22.05, when a node that was taken for dead came back): the ghost would kill its successor.
    """
    job = job_id(environ)
    if code == exitcodes.DONE or job is None or scheduler(environ) != "slurm":
        return code
    attempt = Attempt(job, int(environ.get("SLURM_RESTART_COUNT") or 0))
    newer = successor(read_events(run), attempt)
    if newer is None:
        return code
    print(
        f"hpcrun: {newer.owner} has taken over; {attempt.owner} leaves", file=sys.stderr, flush=True
    )
    return exitcodes.DONE
