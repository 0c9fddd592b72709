"""Restarts inside the allocation: each kind of program starts again as a new step of the same job."""

from __future__ import annotations

import os
import signal
import time

import psutil
import pytest

from hpcrun.run.directory import RunDirectory
from tests.support import jobs, scripts_of_others
from tests.support.frameworks import make_environment

from .cluster import SlurmCluster
from .scripts import ENDED, Bench

pytestmark = [pytest.mark.slurm, pytest.mark.lifecycle]


# The ranks that other tests have killed must not exclude a node.
KEEP = "job.exclude_after=null"
SHAPE = ("--nodes", "2", "--gpus", "2", "--cpu", "--executor", "slurm", "--detach", KEEP)


@pytest.fixture(scope="module")
def bench(slurm: SlurmCluster) -> Bench:
    return Bench(slurm)


def kill_rank(run: RunDirectory, rank: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Kill the program of ``rank``, whatever started it."""
    wanted = {"HPCRUN_RUN": str(run.path), "RANK": str(rank)}
    found = []
    for process in psutil.process_iter():
        try:
            environ = process.environ()
        except psutil.Error:
            continue
        if wanted.items() <= environ.items() and "SLURM_STEP_NODELIST" in environ:
            found.append(process)
    known = {process.pid for process in found}
    first = [process for process in found if process.ppid() not in known]
    # The program that starts the ranks of a node may have this number too, and is older.
    os.kill(max(first, key=psutil.Process.create_time).pid, number)


def attempts(run: RunDirectory) -> list[str]:
    """Return the numbers of the attempts that have opened the run."""
    return [event.attempt.label for event in jobs.events(run, "opened") if event.attempt]


def log(run: RunDirectory, attempt: str, rank: int = 0) -> str:
    paths = list(run.logs.glob(f"*/restart-{attempt}/rank-{rank:05d}.log"))
    return paths[0].read_text() if paths else ""


def check_end(bench: Bench, run: RunDirectory) -> None:
    """Check that the run was restarted once, in place, and has finished."""
    job = bench.status(run.name)["job"]
    bench.wait_for_end(job)
    ends = [event.cause for event in jobs.events(run, "ended")]
    assert (jobs.result(run).get("state"), ends) == ("finished", ["crash", "finished"])
    assert attempts(run) == ["0", "0.1"], bench.told(run)
    assert bench.slurm.restarts(job) == 0


# An end within a minute and without a save would need a requeue.
ELEMENT = """\
echo "start $HPCRUN_RESTART"
[ "$RANK" = 0 ] && python -c "import hpcrun; hpcrun.report(1, saved=True)"
if [ "$1" = calm ]; then
    echo waits
    until grep -q finished "$HPCRUN_RUN/../000/result.json"; do sleep 0.2; done
elif [ "$HPCRUN_RESTART" = 0 ]; then
    echo waits; exec sleep 300
fi
"""


def test_a_script_and_a_sweep_start_again_in_place(bench: Bench) -> None:
    bench.write("element.sh", ELEMENT)
    shape = ("--nodes", "1", "--gpus", "1", "--cpu", "--executor", "slurm", "--no-snapshot")
    options = (KEEP, "job.cpus_per_task=1", "--sweep=kind=crash,calm")
    bench.hpcrun("submit", "--name", "p", *shape, *options, "--", "sh", "element.sh", "{kind}")
    bench.submit("script", KEEP, "--", "sh", "element.sh", "crash")
    script, crash, calm = (bench.run(name) for name in ("script", "p/000", "p/001"))
    waiting = [(script, 0), (script, 3), (crash, 0), (calm, 0)]
    bench.slurm.wait_until(
        lambda: all("waits" in log(run, "0", rank) for run, rank in waiting),
        ENDED,
        lambda: bench.told(script) + bench.told(crash),
    )
    kill_rank(script, 3)
    kill_rank(crash, 0)
    check_end(bench, script)
    check_end(bench, crash)
    assert attempts(calm) == ["0"]
    assert log(script, "0", 1).startswith("start 0\nwaits\n")
    assert log(script, "0.1", 1) == "start 1\n"


@pytest.mark.slow
def test_a_program_with_its_own_ranks_starts_again_in_place(slurm: SlurmCluster) -> None:
    """Without a reported save, an attempt restarts in place if it ran for a minute."""
    bench = Bench(slurm)
    interpreter = make_environment(slurm.shared / "frameworks", "accelerate")
    bench.write("train.py", scripts_of_others.DDP)
    bench.write("epochs.py", scripts_of_others.ACCELERATE)
    slurm.run(["mkdir", str(bench.folder / "saved"), str(bench.folder / "kept")])
    environ = bench.environment()
    environ["PATH"] = f"{interpreter.parent}:{environ['PATH']}"
    commands = {
        "torchrun": ("--launcher", "torchrun", "--", "train.py", "700", "saved", "0.1"),
        "accelerate": ("--launcher", "accelerate", "--", "epochs.py", "110", "kept", "0.8"),
    }
    for name, command in commands.items():
        hpcrun = [slurm.python, "-m", "hpcrun", "submit", *SHAPE, "--name", name, "--no-snapshot"]
        slurm.run([*hpcrun, *command], cwd=bench.folder, env=environ)
    runs = [bench.run(name) for name in commands]

    def long_enough() -> bool:
        begun = [[event.time for event in jobs.events(run, "started")] for run in runs]
        return all(begun) and time.time() > max(map(max, begun)) + 62.0

    slurm.wait_until(long_enough, ENDED, lambda: "".join(map(bench.told, runs)))
    for run in runs:
        kill_rank(run, 1)
    for run in runs:
        check_end(bench, run)
        assert "rank 0 is done" in log(run, "0.1")
    # The other program saves its state only on a signal.
    assert "epoch 0\n" not in log(runs[1], "0.1")
