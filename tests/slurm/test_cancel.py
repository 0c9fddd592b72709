"""scancel is a wish: the run saves and stops, is not started again, and can be continued."""

from __future__ import annotations

import pytest

from tests import jobs

pytestmark = pytest.mark.slurm


@pytest.mark.parametrize("by", ["hpcrun", "scancel"])
def test_cancelled_it_saves_stops_and_resumes_to_the_same_bits(bench, calm, by):
    run = bench.submit("halted", model__pause=0.05)
    with bench.held_at(run, 13):
        job = bench.job(run)
        if by == "scancel":
            bench.slurm.run(["scancel", job])
        else:
            told = bench.hpcrun("cancel", "halted").stdout
            assert "halted is stopped at step" in told
    assert bench.wait_for_end(run) == "CANCELLED", bench.story(run)
    (stopped,) = jobs.events(run, "stopped")
    assert stopped.fields["committed"]
    assert (stopped.step or 0) >= 13
    assert bench.causes(run) == ["cancelled"]
    assert bench.result(run)["step"] == stopped.step
    assert "stopped" in bench.hpcrun("status", "halted").stdout
    bench.hpcrun("resume", "halted")
    assert bench.wait_for_end(run) == "COMPLETED", bench.story(run)
    assert [event.step for event in jobs.events(run, "started")] == [0, stopped.step]
    assert jobs.final_state(run) == jobs.final_state(calm)
    assert bench.slurm.restarts(job) == 0


@pytest.mark.slow
def test_a_sigterm_without_a_cancellation_costs_a_requeue_and_no_bit(bench, calm):
    run = bench.submit("hit", model__pause=0.1)
    with bench.held_at(run, 13):
        bench.slurm.run(["scancel", "--signal=TERM", bench.job(run)])
    assert bench.wait_for_end(run) == "COMPLETED", bench.story(run)
    assert bench.causes(run) == ["crash", "finished"]
    assert bench.slurm.restarts(bench.job(run)) == 1
    (stopped,) = jobs.events(run, "stopped")
    assert [event.step for event in jobs.events(run, "started")] == [0, stopped.step]
    assert jobs.final_state(run) == jobs.final_state(calm)


@pytest.mark.slow
@pytest.mark.parametrize("by", ["hpcrun", "scancel"])
def test_a_cancellation_that_meets_the_requeue_sticks(bench, by):
    late = bench.folder / "late"
    late.mkdir()
    (late / "scontrol").write_text(
        '#!/bin/bash\n[ "$1" != requeue ] || sleep 3\nexec /usr/bin/scontrol "$@"\n'
    )
    (late / "scontrol").chmod(0o755)
    setup = [f"export PATH={late}:$PATH"]
    run = bench.submit("met", model__pause=0.05, **{"job.setup": setup})
    with bench.held_at(run, 3):
        bench.hpcrun("preempt", "met")
    jobs.wait_for(lambda: bool(jobs.events(run, "ended")))
    if by == "scancel":
        bench.slurm.run(["scancel", bench.job(run)])
    else:
        bench.hpcrun("cancel", "--no-wait", "met")
    assert bench.wait_for_end(run) == "CANCELLED", bench.story(run)
    assert bench.causes(run) == ["preemption"]
    assert "stopped" in bench.hpcrun("status", "met").stdout
    assert len(jobs.events(run, "opened")) == 1


def test_cancelled_at_once_it_is_not_started_again(bench):
    run = bench.submit("ended", model__pause=0.1, checkpoint__every=0)
    with bench.held_at(run, 3):
        told = bench.hpcrun("cancel", "--now", "ended").stdout
    assert "killed" in told
    assert "ended is stopped" in told
    assert not jobs.events(run, "saved")
    assert bench.causes(run) == ["cancelled"]
    assert bench.wait_for_end(run) == "FAILED"
    assert bench.slurm.restarts(bench.job(run)) == 0


def test_a_job_that_waits_is_cancelled_by_either_road_and_never_lost(bench):
    held = {"job.sbatch_args": ["--hold"]}
    bench.submit("ours", **held)
    theirs = bench.submit("theirs", **held)
    assert "is stopped" in bench.hpcrun("cancel", "ours").stdout
    bench.slurm.run(["scancel", bench.job(theirs)])
    told = bench.hpcrun("status").stdout
    assert told.count("stopped") == 2
    assert "lost" not in told
    bench.hpcrun("resume", "ours")
    assert "pending" in bench.hpcrun("status", "ours").stdout


@pytest.mark.slow
def test_a_requeued_job_that_waits_for_its_start_is_cancelled_for_good(bench):
    run = bench.submit("again", model__pause=0.05)
    with bench.held_at(run, 3):
        bench.hpcrun("preempt", "again")
    bench.slurm.wait_state(bench.job(run), "PENDING")
    assert "restart 1 after preemptions" in str(jobs.events(run, "ended")[0].fields["decision"])
    assert "pending" in bench.hpcrun("status", "again").stdout
    told = bench.hpcrun("cancel", "again").stdout
    assert "cancelled while it waited" in told
    assert f"is stopped at step {jobs.events(run, 'stopped')[0].step}" in told
    assert "stopped" in bench.hpcrun("status", "again").stdout
    assert bench.wait_for_end(run) == "CANCELLED"
