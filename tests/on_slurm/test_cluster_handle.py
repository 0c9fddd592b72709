"""The handle of the other tests, with the example that docs/devcluster.md names."""

from __future__ import annotations

import pytest


@pytest.mark.slow
@pytest.mark.slurm
def test_a_requeued_job_runs_again(slurm):
    job = slurm.sbatch("-N2", "--requeue", "--wrap", "srun sleep 300")
    slurm.wait_state(job, "RUNNING")
    slurm.kill_node("node1")
    slurm.wait_restarts(job, 1)
    slurm.heal()


@pytest.mark.slurm
def test_the_interpreter_runs_jobs_and_writes_to_the_shared_directory(slurm):
    code = "import sys; open('written', 'w').write(sys.executable)"
    job = slurm.sbatch("-N1", script=f'#!/bin/sh\n{slurm.python} -c "{code}"\n')
    assert slurm.wait_state(job) == "COMPLETED"
    assert (slurm.shared / "written").read_text() == slurm.python
    assert (slurm.shared / "written").owner() == slurm.user
    (row,) = slurm.squeue("-j", job)
    assert (row["state"], row["restartcnt"]) == ("COMPLETED", "0")
    assert slurm.squeue("-u", slurm.user)
