"""A run with a range of nodes takes at each start the nodes that are free, and each sample once."""

from __future__ import annotations

import json

import numpy as np
import pytest

from hpcrun.run.directory import RunDirectory
from hpcrun.run.events import Attempt
from hpcrun.train.data.batching import samples
from tests import jobs

from .training import Bench

pytestmark = [pytest.mark.slurm, pytest.mark.lifecycle]
BATCH = 32


def read_samples(bench: Bench, run: RunDirectory, restart: int, nodes: int) -> list[int]:
    """Return the samples of all ranks in an attempt, sorted."""
    job, found = bench.job(run), []
    for rank in range(nodes):
        path = bench.folder / f"samples-{job}-{restart}-{rank}.jsonl"
        # Each process computes its first micro-batch twice, to lay out DDP's buckets.
        for line in path.read_text().splitlines()[1:]:
            found += json.loads(line)
    return sorted(found)


@pytest.mark.parametrize("counts", [(3, 2), pytest.param((2, 3), marks=pytest.mark.slow)])
def test_a_run_takes_the_free_nodes_at_each_start(bench: Bench, counts: tuple[int, int]) -> None:
    # This job takes two of the four nodes as soon as they are free.
    wait = ["--exclusive", "-N2", "--output=/dev/null", "--wrap", "sleep 600"]
    other = bench.slurm.sbatch(*wait) if counts[0] == 2 else None
    if other is not None:
        bench.slurm.wait_state(other, "RUNNING")
    run = bench.submit("moving", "--nodes", "2-3", train__batch_size=BATCH, train__steps=30)
    with bench.held_at(run, 4):
        if other is not None:
            bench.slurm.run(["scancel", other])
        else:
            # It waits for the end of the attempt, and starts before the requeued run.
            bench.slurm.sbatch(*wait)
        bench.hpcrun("preempt", "moving")
    assert bench.wait_for_end(run) == "COMPLETED", bench.story(run)

    started = jobs.events(run, "started")
    shapes = [(event.fields["nodes"], event.fields["accumulation"]) for event in started]
    assert shapes == [(nodes, {2: 3, 3: 2}[nodes]) for nodes in counts], bench.story(run)
    bounds = [*(event.step or 0 for event in started), 30]
    for restart, nodes in enumerate(counts):
        span = np.arange(bounds[restart] * BATCH, bounds[restart + 1] * BATCH)
        expected = sorted(samples(span, 203, seed=3).tolist())
        assert read_samples(bench, run, restart, nodes) == expected
    log = (
        run.attempt_logs(Attempt(bench.job(run), counts.index(2))) / "rank-00000.log"
    ).read_text()
    assert "hpcrun: 2 of 2-3 nodes: accumulation 3 instead of 2; " in log
