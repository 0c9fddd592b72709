"""The unchanged scripts of sbatch/, submitted to a real Slurm by an ordinary user."""

from __future__ import annotations

import shlex

import pytest

from tests.support import jobs
from tests.support.jobs import outcome

from .cluster import SlurmCluster
from .scripts import SBATCH, Bench

pytestmark = pytest.mark.slurm
TWO_BY_TWO = ("--nodes=2", "--ntasks-per-node=2")


@pytest.fixture(scope="module")
def bench(slurm: SlurmCluster) -> Bench:
    return Bench(slurm)


@pytest.fixture(scope="module")
def undisturbed(bench: Bench) -> dict[str, str]:
    """The final state of an undisturbed run of four ranks with train.sbatch."""
    run = bench.prepare("calm")
    job = bench.sbatch(*TWO_BY_TWO, str(SBATCH / "train.sbatch"), "runs/calm")
    bench.wait_for_end(job)
    assert outcome(run) == ("finished", ["finished"]), bench.told(run)
    return jobs.final_state(run)


@pytest.mark.lifecycle
def test_a_preempted_raw_job_ends_with_the_same_state(
    bench: Bench, undisturbed: dict[str, str]
) -> None:
    run = bench.prepare("rough", model__pause=0.05)
    # Slurm's messages go to the file of the errors.
    shape = (*TWO_BY_TWO, "--error=errors")
    job = bench.sbatch(*shape, str(SBATCH / "train.sbatch"), "runs/rough")
    with bench.held_at(run, 5):
        assert (bench.status("rough")["job"], bench.status("rough")["state"]) == (job, "running")
        assert "starting at step 0, 4 ranks" in bench.hpcrun("logs", "rough")
        bench.preempt_everything()
    bench.wait_for_end(job)
    assert outcome(run) == ("finished", ["preemption", "finished"]), bench.told(run)
    assert bench.slurm.restarts(job) == 1
    assert jobs.final_state(run) == undisturbed


@pytest.mark.lifecycle
def test_under_torchrun_a_preempted_job_ends_with_the_same_state(
    bench: Bench, undisturbed: dict[str, str]
) -> None:
    run = bench.prepare("torchrun", model__pause=0.05)
    shape = ("--nodes=2", "--ntasks-per-node=1", "--export=ALL,RANKS=2")
    job = bench.sbatch(*shape, str(SBATCH / "train_torchrun.sbatch"), "runs/torchrun")
    with bench.held_at(run, 5):
        bench.preempt_everything()
    bench.wait_for_end(job)
    assert outcome(run) == ("finished", ["preemption", "finished"]), bench.told(run)
    assert jobs.final_state(run) == undisturbed
    assert "resumed from step" in bench.hpcrun("logs", "torchrun")


@pytest.mark.slow
def test_the_printed_sbatch_command_trains_and_continues_a_canceled_run(
    bench: Bench, undisturbed: dict[str, str]
) -> None:
    run = bench.prepare("halted", model__pause=0.05)
    line = shlex.split(bench.hpcrun("submit", "--prepare", *bench.same("halted")).splitlines()[-1])
    assert line[0] == "sbatch"
    first = bench.sbatch(*line[1:])
    with bench.held_at(run, 5):
        bench.hpcrun("cancel", "halted")
    bench.wait_for_end(first, "CANCELLED")
    assert outcome(run) == ("cancelled", ["cancelled"]), bench.told(run)
    second = bench.sbatch(*line[1:])
    bench.wait_for_end(second)
    assert outcome(run) == ("finished", ["cancelled", "finished"]), bench.told(run)
    assert jobs.final_state(run) == undisturbed


@pytest.mark.slow
def test_each_element_of_an_array_keeps_its_own_budget(bench: Bench) -> None:
    names = [f"sweep-{seed}" for seed in range(2)]
    runs = [
        bench.prepare(name, model__pause=0.05, seed=seed, job__nodes=1)
        for seed, name in enumerate(names)
    ]
    array = bench.sbatch(
        *("--array=0-1", "--nodes=1", "--ntasks-per-node=2"),
        str(SBATCH / "sweep_array.sbatch"),
        *(f"runs/{name}" for name in names),
    )
    bench.wait_for_step(runs[0], 5)
    with bench.held_at(runs[1], 5):
        assert bench.status("sweep-1")["job"] == f"{array}_1"
        bench.hpcrun("preempt", "sweep-1")
    for element in range(2):
        bench.wait_for_end(f"{array}_{element}")
    assert outcome(runs[0]) == ("finished", ["finished"]), bench.told(runs[0])
    assert outcome(runs[1]) == ("finished", ["preemption", "finished"]), bench.told(runs[1])
