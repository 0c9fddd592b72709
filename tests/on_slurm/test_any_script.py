"""Any script on the real Slurm: restarts, signals and exit codes without an import of hpcrun."""

from __future__ import annotations

import pytest

from hpcrun.run.directory import RunDirectory
from tests.support import jobs, scripts_of_others

from .cluster import SlurmCluster
from .scripts import ENDED, Bench

pytestmark = pytest.mark.slurm


@pytest.fixture(scope="module")
def bench(slurm: SlurmCluster) -> Bench:
    return Bench(slurm)


@pytest.mark.lifecycle
def test_a_preempted_ddp_script_resumes_from_its_own_checkpoint(
    bench: Bench,
) -> None:
    bench.write("train.py", scripts_of_others.DDP)
    bench.slurm.run(["mkdir", str(bench.folder / "saved")])
    run = bench.submit("plain-ddp", "--", "python", "train.py", "40", "saved", "0.1")
    bench.slurm.wait_until(
        lambda: "starts at step 0" in log(run, 0), ENDED, lambda: bench.told(run)
    )
    bench.preempt_everything()
    job = bench.status("plain-ddp")["job"]
    bench.wait_for_end(job)
    ends = [event.cause for event in jobs.events(run, "ended")]
    assert (jobs.result(run).get("state"), ends) == ("finished", ["preemption", "finished"])
    first, second = log(run, 0), log(run, 1)
    # Slurm sends two signals if there is no grace time; a program that forwards them would make it four.
    assert first.count("got SIGTERM") <= 2
    stopped = first.partition("stops after step ")[2].split()[0]
    assert f"rank 0 of 4 starts at step {stopped}\n" in second
    assert "rank 0 is done" in bench.hpcrun("logs", "plain-ddp")


def log(run: RunDirectory, restart: int) -> str:
    """Return the output of rank 0 in an attempt of the run's only job."""
    paths = list(run.logs.glob(f"*/restart-{restart}/rank-00000.log"))
    return paths[0].read_text() if paths else ""


def test_a_failed_script_restarts_within_its_budget(bench: Bench) -> None:
    shape = ("--nodes", "2", "--gpus", "1", "--cpu", "--executor", "slurm", "--detach")
    common = (*shape, "--no-snapshot", "restarts.crash=1")
    fails = 'echo "attempt $HPCRUN_RESTART of rank $RANK"; [ $RANK = 0 ] || exec sleep 60; '
    scripts = {
        "unlucky": "[ $HPCRUN_RESTART = 1 ] || { echo no luck today >&2; exit 3; }",
        "hopeless": fails + "echo no luck at all >&2; exit 3",
    }
    for name, script in scripts.items():
        bench.hpcrun("submit", "--name", name, *common, "--", "sh", "-c", script)
    bench.wait_for_end(bench.status("unlucky")["job"])
    bench.wait_for_end(bench.status("hopeless")["job"], "FAILED")
    unlucky, hopeless = bench.run("unlucky"), bench.run("hopeless")
    ends = jobs.events(unlucky, "ended")
    assert [event.cause for event in ends] == ["crash", "finished"], bench.told(unlucky)
    assert "no luck today" in str(ends[0].reason)
    assert jobs.result(unlucky)["state"] == "finished"
    # The failed rank also ended the rank that waits a minute.
    ends = jobs.events(hopeless, "ended")
    assert [event.cause for event in ends] == ["crash", "crash"], bench.told(hopeless)
    assert "no luck at all" in str(jobs.result(hopeless)["reason"])
    assert "restarts.crash" in str(ends[1].decision)
    job = bench.status("hopeless")["job"]
    assert bench.slurm.restarts(job) == 1
    assert bench.slurm.scontrol_show_job(job)["ExitCode"].partition(":")[0] == "3"
