"""torchrun in a batch script without srun: each worker has torchrun's rank."""

from __future__ import annotations

import pytest

from .cluster import SlurmCluster
from .scripts import Bench

pytestmark = pytest.mark.slurm

SCRIPT = """#!/bin/bash
#SBATCH --nodes=1 --ntasks-per-node=2 --gpus-per-node=2 --output=output.log
{python} -m torch.distributed.run --standalone --nproc-per-node 2 who.py
{python} who.py
"""
WHO = """
import os
from hpcrun.errors import ClusterError
from hpcrun.slurm.placement import read_placement
try:
    found = read_placement(os.environ)
    print(f"{found.method} rank {found.rank} of {found.world_size}", flush=True)
except ClusterError as error:
    print(error, flush=True)
"""


def test_torchrun_in_a_batch_script_numbers_the_ranks(slurm: SlurmCluster) -> None:
    bench = Bench(slurm)
    bench.write("who.py", WHO)
    bench.write("job.sh", SCRIPT.format(python=slurm.python))
    job = slurm.sbatch("job.sh", cwd=bench.folder, env=bench.environment())
    assert slurm.wait_state(job) == "COMPLETED"
    told = (bench.folder / "output.log").read_text()
    assert "torchrun rank 0 of 2" in told, told
    assert "torchrun rank 1 of 2" in told, told
    # The second process has no launcher: it must not wait for a rank that does not exist.
    assert "started by the batch script of a job with 2 tasks without srun" in told, told
