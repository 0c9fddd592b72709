"""`hpcrun stacks` from a login node, only through the run directory."""

from __future__ import annotations

import json
import os
import signal

import pytest

from .training import Bench

# A stopped process must be the rank itself.
pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("fresh_processes")]


def test_every_rank_answers_and_a_stopped_rank_is_named(bench: Bench) -> None:
    run = bench.submit("stacks", model__pause=0.03, train__steps=4000, train__hang_after=600)
    bench.wait_for_step(run, 5)
    found = json.loads(bench.hpcrun("stacks", "stacks", "--json", "--wait", "300").stdout)
    assert [reply["task"] for reply in found["replies"]] == [0, 1]
    assert {reply["host"] for reply in found["replies"]} == {"node1", "node2"}
    (victim,) = bench.pids(run, 1)
    os.kill(victim, signal.SIGSTOP)
    try:
        text = bench.hpcrun("stacks", "stacks", "--wait", "10").stdout
        assert "rank 1: does not answer" in text
    finally:
        os.kill(victim, signal.SIGCONT)
        bench.hpcrun("cancel", "stacks")
    bench.wait_for_end(run)
