"""Runs of a sweep that share a job (`--pack`): each has its own end, and one requeue continues the rest."""

from __future__ import annotations

import pytest

from tests import jobs

from .cluster import SlurmCluster
from .scripts import ENDED, Bench

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

SHAPE = ("--nodes", "1", "--gpus", "1", "--cpu", "--executor", "slurm", "--no-snapshot")
# The first start waits; after a preemption the run finishes.
ELEMENT = """\
echo "$1 $HPCRUN_RESTART $SLURM_NTASKS $MASTER_PORT" >> ran
[ "$1" = done ] && exit 0
[ "$1" = crash ] && exit 3
[ "$HPCRUN_RESTART" != 0 ] && exit 0
trap 'exit 143' TERM USR1 USR2
echo waits
while :; do sleep 0.1; done
"""


def test_packed_runs_have_their_own_ends_and_share_a_requeue(slurm: SlurmCluster) -> None:
    bench = Bench(slurm)
    bench.write("element.sh", ELEMENT)
    kinds = ["done", "crash", "cancelled", "preempted"]
    axes = f"--sweep=kind={','.join(kinds)}"
    options = ("restarts.crash=0", "job.cpus_per_task=1", "--pack", "4")
    line = ["submit", "--name", "p", *SHAPE, *options, axes, "--", "sh", "element.sh", "{kind}"]
    bench.hpcrun(*line)
    runs = [bench.run(f"p/{number:03d}") for number in range(4)]

    def told() -> str:
        packs = (bench.folder / "runs" / "p" / "logs").glob("pack-*.log")
        return "\n".join([*map(bench.told, runs), *(path.read_text() for path in packs)])

    def state(number: int) -> object:
        return jobs.result(runs[number]).get("state")

    def waiting() -> bool:
        logs = [path for run in runs for path in run.logs.glob("*/restart-0/rank-00000.log")]
        return sum("waits" in path.read_text() for path in logs) == 2

    slurm.wait_until(waiting, ENDED, told)
    slurm.wait_until(lambda: (state(0), state(1)) == ("finished", "failed"), ENDED, told)
    assert [bench.status(f"p/{number:03d}")["state"] for number in range(4)] == [
        "finished", "failed", "running", "running",
    ]  # fmt: skip
    # One task of one array, with one rank for each run.
    (job,) = {event.attempt for run in runs for event in jobs.events(run, "submitted")}
    assert job is not None
    cancelled = bench.hpcrun("cancel", "p/002")
    assert "the other runs of the job continue" in cancelled
    assert state(2) == "cancelled"
    assert bench.status("p/003")["state"] == "running"
    bench.hpcrun("preempt", "p/003")
    slurm.wait_until(lambda: state(3) == "finished", ENDED, told)
    bench.slurm.wait_until(lambda: slurm.state(job.job) == "COMPLETED", ENDED, told)
    assert slurm.restarts(job.job) == 1
    ran = [row.split() for row in (bench.folder / "ran").read_text().splitlines()]
    # Runs with an end have not started again.
    assert sorted((kind, restart) for kind, restart, _, _ in ran) == [
        ("cancelled", "0"), ("crash", "0"), ("done", "0"), ("preempted", "0"), ("preempted", "1"),
    ]  # fmt: skip
    assert {tasks for _, _, tasks, _ in ran} == {"1"}
    assert len({port for kind, restart, _, port in ran if restart == "0"}) == 4
    again = bench.hpcrun(*line)
    assert "2 runs submitted; 2 left as they are" in again


# The first start of both kinds waits; one of them hears no signal.
DEAF = """\
[ -e "begun-$1" ] && exit 0
if [ "$1" = deaf ]; then trap '' TERM USR1 USR2; else trap 'exit 143' TERM USR1 USR2; fi
touch "begun-$1"
while :; do sleep 0.1; done
"""


@pytest.mark.parametrize("requeues", [True, False])
def test_a_run_that_ignores_the_limit_ends_alone(slurm: SlurmCluster, requeues: bool) -> None:
    """The job is requeued; where the site forbids that, each run continues in a separate job."""
    bench = Bench(slurm)
    bench.write("element.sh", DEAF)
    options = ["job.time=00:01:00", "job.signal_lead=40", "job.cpus_per_task=1", "--pack", "2"]
    if not requeues:
        options.append('job.sbatch_args=["--no-requeue"]')
    axes = "--sweep=kind=deaf,polite"
    bench.hpcrun(
        "submit", "--name", "d", *SHAPE, *options, axes, "--", "sh", "element.sh", "{kind}"
    )
    runs = [bench.run(f"d/{number:03d}") for number in range(2)]

    def told() -> str:
        packs = (bench.folder / "runs" / "d" / "logs").glob("pack-*.log")
        return "\n".join([*map(bench.told, runs), *(path.read_text() for path in packs)])

    def finished() -> bool:
        return all(jobs.result(run).get("state") == "finished" for run in runs)

    slurm.wait_until(finished, ENDED, told)
    for run in runs:
        causes = [event.cause for event in jobs.events(run, "ended")]
        assert causes == ["time-limit", "finished"], told()
    submitted = [{event.attempt for event in jobs.events(run, "submitted")} for run in runs]
    assert [len(made) for made in submitted] == ([1, 1] if requeues else [2, 2])
    assert len(set.union(*submitted)) == (1 if requeues else 3)
