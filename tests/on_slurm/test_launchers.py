"""Programs that start their own ranks, as one task per node of the real Slurm, preempted and requeued."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hpcrun.run.directory import RunDirectory
from tests.support import jobs, scripts_of_others
from tests.support.frameworks import make_environment

from .cluster import SlurmCluster
from .scripts import ENDED, Bench

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

SHAPE = ("--nodes", "2", "--gpus", "2", "--cpu", "--executor", "slurm", "--detach")

SCRIPTS = {
    "train.py": scripts_of_others.DDP,
    "spawn.py": scripts_of_others.SPAWN,
    "epochs.py": scripts_of_others.ACCELERATE,
}
DDP = ("{} of 4 starts at step 0\n", "starts at step")
EPOCHS = ("{} of 4 epoch 1\n", "epoch")
CASES = {
    "torchrun": (("--launcher", "torchrun", "--", "train.py", "60", "saved", "0.2"), DDP),
    "accelerate": (("--launcher", "accelerate", "--", "epochs.py", "10", "saved", "0.5"), EPOCHS),
    "spawn": (("--tasks-per-node", "1", "--", "python", "spawn.py", "60", "saved", "0.2"), DDP),
}


@pytest.fixture(scope="module")
def interpreter(slurm: SlurmCluster) -> Path:
    """A Python with Accelerate that the job user can read."""
    return make_environment(slurm.shared / "frameworks", "accelerate")


@pytest.mark.parametrize("name", CASES)
def test_a_preempted_program_with_its_own_ranks_resumes(
    slurm: SlurmCluster, interpreter: Path, name: str
) -> None:
    command, (started, begins) = CASES[name]
    bench = Bench(slurm)
    for script, text in SCRIPTS.items():
        bench.write(script, text)
    slurm.run(["mkdir", str(bench.folder / "saved")])
    environ = bench.environment()
    environ["PATH"] = f"{interpreter.parent}:{environ['PATH']}"
    hpcrun = [slurm.python, "-m", "hpcrun", "submit", *SHAPE, "--name", name, "--no-snapshot"]
    slurm.run([*hpcrun, *command], cwd=bench.folder, env=environ)
    run = bench.run(name)
    expected = [f"rank {started.format(rank)}" for rank in range(4)]
    slurm.wait_until(
        lambda: all(line in logs(run, 0) for line in expected), ENDED, lambda: bench.told(run)
    )
    bench.preempt_everything()
    bench.wait_for_end(bench.status(name)["job"])
    ends = [event.cause for event in jobs.events(run, "ended")]
    assert (jobs.result(run).get("state"), ends) == ("finished", ["preemption", "finished"])
    assert f"of 4 {begins} 0\n" not in logs(run, 1)
    for rank in range(4):
        assert f"rank {rank} of 4 {begins}" in logs(run, 1)
        assert f"rank {rank} is done" in logs(run, 1)


@pytest.mark.parametrize("launcher", ["torchrun"])
def test_the_rank_that_failed_first_is_reported(slurm: SlurmCluster, launcher: str) -> None:
    bench = Bench(slurm)
    text = scripts_of_others.DDP.replace("rank == 1:", "rank == 3:")
    bench.write("train.py", text)
    slurm.run(["mkdir", str(bench.folder / "saved")])
    slurm.run(["touch", str(bench.folder / "saved" / "crash")])
    common = (*SHAPE, "--name", "crash", "--no-snapshot", "restarts.crash=1")
    bench.hpcrun("submit", *common, "--launcher", launcher, "--", "train.py", "20", "saved", "0.1")
    run = bench.run("crash")
    bench.wait_for_end(bench.status("crash")["job"])
    ends = jobs.events(run, "ended")
    assert [event.cause for event in ends] == ["crash", "finished"], bench.told(run)
    reason = str(ends[0].reason)
    assert re.match(r"rank 1 on node\d: ScriptFailed: train.py 20 saved 0.1 ended with", reason), (
        reason
    )
    assert reason.endswith("rank 3: ValueError: broken data"), reason


def logs(run: RunDirectory, restart: int) -> str:
    """Return the output of all tasks in an attempt of the run's only job."""
    return "".join(path.read_text() for path in run.logs.glob(f"*/restart-{restart}/rank-*.log"))
