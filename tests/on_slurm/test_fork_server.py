"""Ranks that a fork server starts in one step of a job, for the tasks of another step."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path

import pytest

from .cluster import SlurmCluster

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "tests" / "ranks" / "forked_rank.py"
PER_NODE = "srun --overlap --ntasks-per-node=1 --nodes=2 --ntasks=2"

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

SCRIPT = f"""#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=2 --output=batch.log
export PYTHONPATH={ROOT} HPCRUN_FORK_SERVER=job$SLURM_JOB_ID OMP_NUM_THREADS=1
python={shlex.quote(sys.executable)}
rank="srun --overlap --ntasks=4 --kill-on-bad-exit=1 $python -u {PROGRAM}"
{PER_NODE} $python -m hpcrun.ranks.fork_server --threads=1 $HPCRUN_FORK_SERVER -- -u {PROGRAM} &
until {PER_NODE} $python -c "
import os
from hpcrun.ranks.fork_messages import connect, own_address
connect(own_address(os.environ['HPCRUN_FORK_SERVER']), 5.0)
" 2> /dev/null; do sleep 0.2; done
srun --overlap --ntasks=4 --output=facts-%t $python -u {PROGRAM} facts
$rank exit 75 > /dev/null; echo exit $?
$rank die 9 > /dev/null 2>&1; echo die $?
srun --overlap --ntasks=4 --output=helper-%t $python -u {PROGRAM} helper &
until [ "$(cat helper-? 2> /dev/null | wc -l)" = 4 ]; do sleep 0.1; done
scancel --signal=KILL --quiet $SLURM_JOB_ID.$(squeue --noheader --steps --job=$SLURM_JOB_ID \\
    --format=%i | sed 's/.*[.]//' | grep '^[0-9]' | sort -n | tail -1)
wait $!; echo killed $?
srun --overlap --ntasks=4 --output=after-%t $python -u {PROGRAM} facts
{PER_NODE} --output=left-%t ps -ww -e -o pid,args
scancel --quiet $SLURM_JOB_ID
"""


def test_ranks_of_a_server_end_with_their_step(slurm: SlurmCluster) -> None:
    folder = slurm.shared / "fork-server"
    folder.mkdir()
    user = slurm.shared.stat()
    os.chown(folder, user.st_uid, user.st_gid)
    job = slurm.sbatch(script=SCRIPT, cwd=folder)
    slurm.wait_state(job)
    batch = (folder / "batch.log").read_text()
    assert "exit 75" in batch, batch
    assert "die 137" in batch, batch
    for step in ("facts", "after"):
        found = [json.loads((folder / f"{step}-{task}").read_text()) for task in range(4)]
        assert all(one["forked"] for one in found), batch
        ranks = {one["same"]["environ"]["SLURM_PROCID"] for one in found}
        assert ranks == {"0", "1", "2", "3"}
    killed = {
        number
        for task in range(4)
        for number in (folder / f"helper-{task}").read_text().split()[:2]
    }
    left = [line for path in folder.glob("left-*") for line in path.read_text().splitlines()]
    # The server still runs. Its node has no process that waits for those of killed ranks.
    assert any("forked_rank.py" in line for line in left)
    running = {line.split()[0] for line in left if "<defunct>" not in line}
    assert not killed & running, left
