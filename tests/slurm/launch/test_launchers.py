"""Commands that start their own ranks, as one task on each simulated node of the local cluster."""

import json
import os
import signal
import sys
from pathlib import Path

from hpcrun.run.directory import RunDirectory
from tests.slurm.launch.test_any_script import logs
from tests.support import jobs
from tests.support.jobs import outcome

SHAPE = ("--nodes", "2", "--gpus", "2", "--cpu", "--executor", "local", "--detach")

# Rank 0 answers the other ranks as long as its script runs.
VARIABLES = """
import json, os, time
names = ("RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE NODE_RANK GROUP_RANK CUDA_VISIBLE_DEVICES "
         "SLURM_NTASKS SLURM_TASKS_PER_NODE OMP_NUM_THREADS")
print(json.dumps({name: os.environ.get(name) for name in names.split()}))
time.sleep(5)
"""


def submit(
    folder: Path, name: str, *arguments: str, env: dict[str, str] | None = None
) -> RunDirectory:
    """Submit to two simulated nodes with two ranks, or GPUs, each."""
    own = ("--name", name, "job.requeue_delay=0.1", "restarts.crash=1")
    done = jobs.hpcrun("submit", *SHAPE, *own, *arguments, cwd=folder, env=env)
    assert done.returncode == 0, done.stderr
    return RunDirectory(folder / "runs" / name)


def test_one_task_per_node_is_one_rank(
    tmp_path: Path,
) -> None:
    (tmp_path / "say.py").write_text(VARIABLES)
    several = {**os.environ, "OMP_NUM_THREADS": ""}
    run = submit(
        tmp_path, "one", "--tasks-per-node", "1", "--", sys.executable, "say.py", env=several
    )
    usual = submit(tmp_path, "usual", "--", sys.executable, "say.py", env=several)
    jobs.wait_for_end(run)
    jobs.wait_for_end(usual)
    told = [json.loads(log.splitlines()[0]) for log in logs(run, 0)]
    cores = len(os.sched_getaffinity(0))
    for rank, variables in enumerate(told):
        assert variables == {
            "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
            "NODE_RANK": str(rank), "GROUP_RANK": str(rank), "CUDA_VISIBLE_DEVICES": None,
            "SLURM_NTASKS": "2", "SLURM_TASKS_PER_NODE": "1(x2)",
            # Two nodes share this machine, and each task may start two ranks.
            "OMP_NUM_THREADS": str(max(1, cores // 4)),
        }  # fmt: skip
    told = [json.loads(log.splitlines()[0]) for log in logs(usual, 0)]
    assert {variables["OMP_NUM_THREADS"] for variables in told} == {str(max(1, cores // 4))}
    assert outcome(run) == ("finished", ["finished"])


# As torchrun does with its ranks.
IN_SESSIONS = """
import os, signal, subprocess, sys
from pathlib import Path
folder, restart = Path(sys.argv[1]), os.environ["HPCRUN_RESTART"]
if restart == "1":
    sys.exit(0)
code = '''import signal, sys, time
def heard(number, frame):
    open(sys.argv[1] + ".heard", "w").write(signal.Signals(number).name)
    sys.exit(0)
signal.signal(signal.SIGTERM, heard)
signal.signal(signal.SIGUSR2, heard)
open(sys.argv[1] + ".ready", "w").close()
time.sleep(600)'''
path = folder / ("rank-" + os.environ["RANK"])
process = subprocess.Popen([sys.executable, "-c", code, str(path)], start_new_session=True)
path.write_text(f"{os.getpid()} {process.pid}")
for number in (signal.SIGTERM, signal.SIGUSR2):
    signal.signal(number, signal.SIG_IGN)
process.wait()
"""


def start_in_sessions(folder: Path, name: str) -> tuple[RunDirectory, list[list[int]]]:
    """Start a task on each node that starts a child in another session; return the two pids."""
    (folder / "sessions.py").write_text(IN_SESSIONS)
    command = ("--tasks-per-node", "1", "--", sys.executable, "sessions.py", str(folder))
    run = submit(folder, name, *command)
    jobs.wait_for(lambda: len(list(folder.glob("rank-*.ready"))) == 2)
    return run, [
        [int(pid) for pid in (folder / f"rank-{rank}").read_text().split()] for rank in (0, 1)
    ]


def test_a_preemption_reaches_processes_in_another_session(tmp_path: Path) -> None:
    run, _ = start_in_sessions(tmp_path, "heard")
    assert jobs.hpcrun("preempt", "heard", cwd=tmp_path).returncode == 0
    jobs.wait_for_end(run)
    assert outcome(run) == ("finished", ["preemption", "finished"])
    assert len(list(tmp_path.glob("rank-*.heard"))) == 2


def test_nothing_that_a_task_has_started_outlives_it(tmp_path: Path) -> None:
    run, pids = start_in_sessions(tmp_path, "killed")
    # The kernel does this when memory is short: the starter dies, and its children receive no signal.
    os.kill(pids[1][0], signal.SIGKILL)
    jobs.wait_for_end(run)
    assert outcome(run) == ("finished", ["crash", "finished"])
    assert all(jobs.has_ended(pid) for pair in pids for pid in pair)


def test_options_of_slurm_are_named_as_ignored(tmp_path: Path) -> None:
    options = ("job.srun_args=[--label]", "job.sbatch_args=[--comment=a]")
    done = jobs.hpcrun("submit", *SHAPE, "--dry-run", *options, "--", "env", cwd=tmp_path)
    assert done.returncode == 0
    for key, option in (("srun_args", "--label"), ("sbatch_args", "--comment=a")):
        assert f"job.{key}: this machine has no Slurm and ignores {option}\n" in done.stderr
