"""Notifications from the batch step of a real Slurm job."""

from __future__ import annotations

import pytest

from hpcrun.run.files import read_lines
from tests.support import jobs

pytestmark = [pytest.mark.slurm]

TARGET = 'cat >> "$HPCRUN_RUN/messages.jsonl"'
EVENTS = ["requeued", "finished", "cancelled"]


def test_a_requeue_and_the_finish_each_send_one_message(bench):
    on = {"watch.notify": TARGET, "watch.notify_on": EVENTS}
    run = bench.submit("told", **on, model__pause=0.05)
    with bench.held_at(run, 13):
        bench.hpcrun("preempt", "told")
    assert bench.wait_for_end(run) == "COMPLETED", bench.story(run)
    messages = run.path / "messages.jsonl"
    jobs.wait_for(lambda: len(read_lines(messages)) == 2, why=bench.story(run))
    told = read_lines(messages)
    assert sorted(one["event"] for one in told) == ["finished", "requeued"]
    assert {one["job"] for one in told} == {bench.job(run)}
    (finished,) = [one for one in told if one["event"] == "finished"]
    assert finished["step"] == 40
