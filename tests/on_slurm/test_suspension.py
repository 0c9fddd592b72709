"""A suspended job: no hang, no restart, the same bits, and a record of the suspension."""

from __future__ import annotations

import time

import pytest

from hpcrun import slurm
from hpcrun.job.scheduler_view import view_of
from tests.support import jobs

from .cluster import PATIENCE
from .training import Bench

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

SUSPENDED_S = 22.0


def shown(bench: Bench, job: str) -> dict[str, str]:
    """Return the controller's fields of the job, with times in Unix seconds."""
    command = ["scontrol", "show", "job", job]
    done = bench.slurm.run(command, env={"SLURM_TIME_FORMAT": "%s"})
    return slurm.parse_show_job(done.stdout)


def test_a_suspended_job_continues_at_the_same_step(bench, calm):
    # Without a limit, Slurm 26.05 shows no time of the end.
    run = bench.submit("suspended", model__pause=0.05, train__hang_after=10, job__time=60)
    bench.wait_for_step(run, 12)
    job = bench.job(run)
    before = shown(bench, job)
    bench.slurm.admin("scontrol", "suspend", job)
    assert bench.slurm.state(job) == "SUSPENDED"
    told = bench.hpcrun("status", "suspended").stdout
    refused = bench.hpcrun("preempt", "suspended", check=False)
    assert refused.returncode == 2
    assert "is suspended and receives no signal" in refused.stderr
    time.sleep(SUSPENDED_S)
    bench.slurm.admin("scontrol", "resume", job)
    after = shown(bench, job)
    assert bench.wait_for_end(run) == "COMPLETED", bench.story(run)
    assert bench.causes(run) == ["finished"], bench.story(run)
    assert bench.slurm.restarts(job) == 0
    assert jobs.final_state(run) == jobs.final_state(calm)
    (event,) = jobs.events(run, "suspended")
    assert SUSPENDED_S - 5 < event.seconds < SUSPENDED_S + 20
    assert event.step is not None
    assert bench.result(run)["goodput"]["suspended"] == event.seconds
    assert "suspended by Slurm" in told
    # Slurm does not count the time against the limit.
    assert float(after["EndTime"]) - float(before["EndTime"]) > SUSPENDED_S - 5
    # An end after a suspension is classified as a preemption.
    assert view_of(before).suspended is None
    assert view_of(after).suspended is not None


def test_a_suspended_script_continues_and_its_time_is_recorded(bench):
    (bench.folder / "count.py").write_text(
        "import time\nfor number in range(20):\n    print(number, flush=True)\n    time.sleep(0.5)\n"
    )
    bench.hpcrun(
        *("submit", "-c", "empty.yaml", "--name", "counting", "--nodes", "2", "--cpu", "--detach"),
        *("job.executor=slurm", "job.mem=1G", "--", bench.slurm.python, "count.py"),
    )
    run = bench.run("counting")
    bench.wait_until(lambda: jobs.events(run, "started") != [], PATIENCE, lambda: bench.story(run))
    job = bench.job(run)
    bench.slurm.admin("scontrol", "suspend", job)
    time.sleep(8.0)
    bench.slurm.admin("scontrol", "resume", job)
    assert bench.wait_for_end(run) == "COMPLETED", bench.story(run)
    assert bench.causes(run) == ["finished"], bench.story(run)
    (event,) = jobs.events(run, "suspended")
    assert 5 < event.seconds < 30


def test_a_suspended_job_can_be_canceled_and_resumed(bench, calm):
    run = bench.submit("unwanted", model__pause=0.05)
    bench.wait_for_step(run, 12)
    job = bench.job(run)
    bench.slurm.admin("scontrol", "suspend", job)
    bench.hpcrun("cancel", "unwanted")
    assert bench.slurm.wait_state(job) == "CANCELLED"
    assert bench.slurm.restarts(job) == 0
    assert (bench.result(run)["state"], bench.result(run)["cause"]) == ("cancelled", "cancelled")
    # Slurm kills a suspended batch step without a signal, usually before it classifies the end.
    assert bench.causes(run) in ([], ["cancelled"])
    bench.hpcrun("resume", "unwanted", "--detach")
    assert bench.job(run) != job
    assert bench.wait_for_end(run) == "COMPLETED", bench.story(run)
    assert bench.causes(run) == ["cancelled", "finished"], bench.story(run)
    assert jobs.final_state(run) == jobs.final_state(calm)
