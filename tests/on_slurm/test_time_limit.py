"""A run stops before its time limit, also after a change of the limit, and ends over several allocations."""

from __future__ import annotations

import pytest

from tests.support import jobs

# Slurm's smallest limit is a minute.
pytestmark = [pytest.mark.slurm, pytest.mark.lifecycle, pytest.mark.slow]

# 40 steps of 1 s: more than fit into the first minute, because the job stops 20 s before its end.
LONG = {"model.pause": 0.5, "job.signal_lead": 20}


def test_a_run_with_a_short_limit_is_requeued_until_finished(bench, calm):
    run = bench.submit("limited", **{"job.time": 1, **LONG})
    assert bench.wait_for_end(run, timeout=600) == "COMPLETED", bench.story(run)
    causes = bench.causes(run)
    assert len(causes) >= 2
    assert causes == ["time-limit"] * (len(causes) - 1) + ["finished"]
    assert bench.slurm.restarts(bench.job(run)) == len(causes) - 1
    assert "DUE TO TIME LIMIT" not in bench.batch_log(run)
    assert all(event.committed for event in jobs.events(run, "stopped"))
    assert jobs.final_state(run) == jobs.final_state(calm)


def test_an_extended_limit_is_used(bench):
    run = bench.submit("extended", **{"job.time": 1, **LONG})
    bench.wait_for_step(run, 1)
    bench.slurm.admin("scontrol", "update", f"jobid={bench.job(run)}", "TimeLimit=10")
    assert bench.wait_for_end(run, timeout=600) == "COMPLETED", bench.story(run)
    assert bench.causes(run) == ["finished"]
