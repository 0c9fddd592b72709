"""The exit of a rank on a node that Slurm took for dead, while the run continues elsewhere."""

import sys
from collections.abc import Mapping

from hpcrun.job import exitcodes
from hpcrun.job.history import successor
from hpcrun.ranks.launchers import job_id, scheduler
from hpcrun.run.directory import RunDirectory
from hpcrun.run.events import Attempt, read_events


def harmless_code(run: RunDirectory, environ: Mapping[str, str], code: int) -> int:
    """Return the exit code for a rank that would exit with ``code``: 0 if a newer attempt owns the run.

    After a failed task, srun ends the step by its name, and the newer attempt's step has the same name
    (observed with Slurm 22.05, when a node returned that was taken for dead): the stale rank would kill
    the newer attempt.
    """
    job = job_id(environ)
    if code == exitcodes.DONE or job is None or scheduler(environ) != "slurm":
        return code
    attempt = Attempt(job, int(environ.get("SLURM_RESTART_COUNT") or 0))
    newer = successor(read_events(run), attempt)
    if newer is None:
        return code
    print(
        f"hpcrun: {newer.owner} owns the run now; {attempt.owner} exits",
        file=sys.stderr,
        flush=True,
    )
    return exitcodes.DONE
