"""Job arrays without a record: the submission was killed after sbatch, or sbatch got no answer.

A submission first writes each array into ``sweep.json``, without a job. The batch script of each array is in
a separate folder (:func:`~hpcrun.slurm.launch.slurm_jobs.submitit_folder`), and Slurm reports each script.
So the next submission finds the array, and refuses.
"""

import os
import time
from dataclasses import replace
from pathlib import Path

from hpcrun import slurm
from hpcrun.config import load_resolved
from hpcrun.run.directory import RunDirectory, RunError
from hpcrun.run.sweep_file import SweepSubmission, read_sweep, write_sweep
from hpcrun.slurm.launch.batch_script import wanted_cluster
from hpcrun.slurm.launch.slurm_jobs import submitit_folder

_TIMEOUT = 6.0
# Seconds after which a request that sbatch has sent no longer reaches the controller.
_ARRIVES = 120.0


def refuse_unrecorded(folder: Path) -> None:
    """Refuse a submission after a killed submission whose array Slurm has, or may still get.

    Raises:
        RunError: Slurm has the array, does not answer, or may still get the array; or ``sweep.json`` is
            damaged.
        OSError: ``sweep.json`` cannot be written.
    """
    sweep = read_sweep(folder)
    if sweep is None:
        return
    recorded = {job for one in sweep.submissions for job in one.jobs}
    begun = [one for one in sweep.submissions if not one.jobs]
    for one in begun:
        found = sorted(set(_jobs_of(folder, one)) - recorded, key=int)
        if found:
            raise RunError(
                f"{folder}: a submission was interrupted after Slurm accepted job {', '.join(found)}; end it "
                f"with `scancel {' '.join(found)}`, then submit again"
            )
    if any(time.time() - one.time < _ARRIVES for one in begun):
        raise RunError(
            f"{folder}: a submission was interrupted less than two minutes ago, and Slurm may still get its "
            "array; submit again in two minutes"
        )
    if begun:
        write_sweep(replace(sweep, submissions=[one for one in sweep.submissions if one.jobs]))


def _jobs_of(folder: Path, one: SweepSubmission) -> list[str]:
    """Return the arrays that Slurm has for the submission."""
    # The element may be missing: the submission was killed before its run directory was made.
    config = RunDirectory(folder / one.elements[0]).config
    cluster = wanted_cluster(load_resolved(config).job) if config.exists() else None
    scripts = submitit_folder(RunDirectory(folder), one.elements[0])
    # Another user may have submitted the array.
    users = {os.getuid(), *(path.stat().st_uid for path in scripts.glob("*.sh"))}
    listed = slurm.run(slurm.squeue_scripts_command(sorted(users), cluster), timeout=_TIMEOUT)
    if listed.returncode != 0:
        raise RunError(
            f"{folder}: a submission was interrupted, and Slurm does not say if it has an array of it "
            f"({' '.join(listed.stderr.split())}); submit again when Slurm answers"
        )
    return [
        job
        for job, script, _ in slurm.parse_scripts(listed.stdout)
        if Path(script).parent.resolve() == scripts.resolve()
    ]
