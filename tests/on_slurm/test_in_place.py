"""Restarts inside the allocation: each kind of program starts again as a new step of the same job."""

from __future__ import annotations

import os
import signal

import psutil
import pytest

from hpcrun.run.directory import RunDirectory
from tests import jobs

from .cluster import SlurmCluster
from .scripts import ENDED, Bench

pytestmark = [pytest.mark.slurm, pytest.mark.lifecycle]

SHAPE = ("--nodes", "2", "--gpus", "2", "--cpu", "--executor", "slurm", "--detach")


@pytest.fixture(scope="module")
def bench(slurm: SlurmCluster) -> Bench:
    return Bench(slurm)


def kill_rank(run: RunDirectory, rank: int) -> None:
    """Kill the program of ``rank`` with SIGKILL, whatever started it."""
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
    (first,) = [process for process in found if process.ppid() not in known]
    os.kill(first.pid, signal.SIGKILL)


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


def test_a_script_and_a_pack_start_again_in_place(bench: Bench) -> None:
    bench.write("element.sh", ELEMENT)
    shape = ("--nodes", "1", "--gpus", "1", "--cpu", "--executor", "slurm", "--no-snapshot")
    options = ("job.cpus_per_task=1", "--pack", "2", "--sweep=kind=crash,calm")
    bench.hpcrun("submit", "--name", "p", *shape, *options, "--", "sh", "element.sh", "{kind}")
    bench.submit("script", "--", "sh", "element.sh", "crash")
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
