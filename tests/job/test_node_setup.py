"""The batch step and the set-up: ``job.setup`` for the ranks, ``job.node_setup`` for every node."""

import os
import shlex
import signal
import time
from pathlib import Path

import pytest

from hpcrun.run.attempt import Attempt
from hpcrun.run.files import read_json
from tests.support.journal import read_events

from .step_substitutes import SHOWN, Desk


def test_the_setup_reaches_the_ranks_and_nothing_else(tmp_path: Path) -> None:
    desk = Desk(
        tmp_path,
        env={"NCCL_IB_HCA": "mlx5_0,mlx5_1", "NOTE": 'it\'s $HOME; "a" # b', "PYTHONHOME": "/no"},
        setup=["export SITE=here", "ulimit -n 77", "cd /usr", "unset_is=$nothing"],
        container=["in", "my box"],
        python="/opt/python",
        srun_args=["--label"],
    )
    seen = shlex.quote(str(tmp_path / "seen"))
    desk.answer("srun", f'echo "$NCCL_IB_HCA|$NOTE|$SITE|$(ulimit -n)|$PWD|$PYTHONHOME" > {seen}')
    desk.answer(
        "scontrol", f"[ $1 = show ] && printf '{SHOWN}'; [ -z $PYTHONHOME ] || echo bad >&2"
    )
    desk.step()
    assert (tmp_path / "seen").read_text() == (
        'mlx5_0,mlx5_1|it\'s $HOME; "a" # b|here|77|/usr|/no\n'
    )
    (srun,) = desk.called("srun")
    assert "--label" in srun
    worker = f"in my box /opt/python -u -m hpcrun.worker {desk.run.path}"
    assert srun.endswith(f'trap "" USR1 USR2; exec "$@" hpcrun {worker}')
    assert "bad" not in desk.told()


def test_every_node_is_prepared_before_the_ranks_start(tmp_path: Path) -> None:
    desk = Desk(tmp_path, nodes=2, env={"DATA": "/scratch"}, node_setup=["cp big.h5 $DATA"])
    desk.step(SLURM_JOB_NUM_NODES="2")
    prepare, ranks = desk.called("srun")
    assert prepare.startswith("srun --nodes=2 --ntasks=2 --ntasks-per-node=1")
    assert "hpcrun.worker" in ranks


def test_a_heterogeneous_job_is_refused(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    shown = SHOWN.replace("JobId=7", "JobId=7 HetJobId=7 HetJobOffset=0")
    desk.answer("scontrol", f"[ $1 = show ] && [ $2 = job ] && printf '{shown}'; true")
    assert desk.step(SLURM_HET_SIZE="2", SLURM_HET_JOB_ID="7") == 2
    assert "batch: a heterogeneous job is not supported" in desk.told()
    assert desk.called("srun") == []


def test_a_node_that_cannot_be_prepared_starts_no_rank(tmp_path: Path) -> None:
    desk = Desk(tmp_path, nodes=2, node_setup=["cp big.h5 /scratch"])
    log = shlex.quote(str(desk.run.attempt_logs(Attempt("7", 0)) / "node-setup-n2.log"))
    words = "bash: line 3: cp: cannot stat big.h5\nhpcrun: node_setup failed on n2 with exit code 1"
    desk.answer("srun", f"echo '{words}' > {log}; exit 1")
    assert desk.step() == 2, desk.told()
    assert len(desk.called("srun")) == 1
    (ended,) = [event for event in read_events(desk.run) if event.tag == "ended"]
    assert ended.reason == "job.node_setup failed on n2: cp: cannot stat big.h5"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("module load CUDA/12", "setup failed at `module load CUDA/12`: module: command not found"),
        ("exit 0", "setup failed at `exit 0`"),
        ("trap 'echo bye' EXIT; false", "setup failed at `job.setup`"),
    ],
)
def test_a_failed_setup_line_is_reported_and_no_rank_starts(
    tmp_path: Path, line: str, words: str
) -> None:
    desk = Desk(tmp_path, setup=["export code=9 RUN=/x job=77", line])
    assert desk.step() == 2, desk.told()
    assert desk.called("srun") == []
    assert words in (read_json(desk.run.result) or {})["reason"]


def test_a_trap_of_the_setup_runs_after_the_ranks(tmp_path: Path) -> None:
    desk = Desk(tmp_path, setup=["trap 'echo the trap has run' EXIT"])
    desk.answer("srun", "echo the ranks have run")
    desk.step()
    told = desk.told().splitlines()
    assert told.index("the ranks have run") < told.index("the trap has run")


def test_what_the_setup_leaves_running_delays_no_decision(tmp_path: Path) -> None:
    desk = Desk(tmp_path, setup=["sleep 900 > /dev/null 2>&1 &", "echo $! > pid"])
    before = time.monotonic()
    os.chdir(tmp_path)
    desk.step()
    assert time.monotonic() - before < 600
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
