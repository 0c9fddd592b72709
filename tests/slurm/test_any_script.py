"""Any script on the real Slurm: what a program that never heard of hpcrun gets from it."""

from __future__ import annotations

import pytest

from hpcrun.run.directory import RunDirectory
from tests import jobs, scripts_of_others

from .cluster import SlurmCluster
from .scripts import ENDED, Bench

pytestmark = pytest.mark.slurm


@pytest.fixture(scope="module")
def bench(slurm: SlurmCluster) -> Bench:
    return Bench(slurm)


def test_an_unmodified_ddp_script_is_preempted_on_slurm_and_goes_on_where_it_saved(
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
    # Slurm itself sends two when there is no grace time; whoever passed them on would make it four.
    assert first.count("got SIGTERM") <= 2
    stopped = first.partition("stops after step ")[2].split()[0]
    assert f"rank 0 of 4 starts at step {stopped}\n" in second
    assert "rank 0 is done" in bench.hpcrun("logs", "plain-ddp")


def log(run: RunDirectory, restart: int) -> str:
    """What rank 0 printed in an attempt of the run's only job."""
    paths = list(run.logs.glob(f"*/restart-{restart}/rank-00000.log"))
    return paths[0].read_text() if paths else ""
