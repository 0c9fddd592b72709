"""MPI programs in a script find srun's PMI (``pip install hpcrun[mpi]``)."""

from __future__ import annotations

import importlib.util

import pytest

from tests.support import jobs

from .cluster import SlurmCluster
from .scripts import ENDED, Bench

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

SUMS = """
import os
from mpi4py import MPI

world = MPI.COMM_WORLD
total = world.allreduce(world.rank + 1)
with open(f"sum-{world.rank}", "w") as out:
    print(world.size, total, os.environ["RANK"], file=out)
"""


@pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="needs the extra mpi")
def test_the_ranks_of_a_script_are_the_ranks_of_mpi(slurm: SlurmCluster) -> None:
    bench = Bench(slurm)
    bench.write("sums.py", SUMS)
    run = bench.submit("mpi", "job.srun_args=[--mpi=pmi2]", "--", "python", "sums.py")
    bench.slurm.wait_until(run.result.exists, ENDED, lambda: bench.told(run))
    assert jobs.result(run)["state"] == "finished", bench.told(run)
    said = [(bench.folder / f"sum-{rank}").read_text().split() for rank in range(4)]
    assert said == [["4", "10", str(rank)] for rank in range(4)]
