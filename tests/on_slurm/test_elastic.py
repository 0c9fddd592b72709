"""A run with a range of nodes takes the nodes that it can have at each start, and each sample once."""

from __future__ import annotations

import json

import numpy as np
import pytest

from hpcrun.run.directory import RunDirectory
from hpcrun.run.journal.events import Event
from hpcrun.slurm.notation import expand
from hpcrun.train.data.batching import samples
from tests.support import jobs

from .cluster import PATIENCE
from .training import Bench

pytestmark = [pytest.mark.slurm, pytest.mark.lifecycle]
BATCH, STEPS = 32, 40


def submit(bench: Bench, **changes: float) -> RunDirectory:
    """Submit a run of two micro-batches per rank on three nodes, and so of three on two nodes."""
    batch = {"train__batch_size": BATCH, "train__accumulation": 2, "train__steps": STEPS}
    return bench.submit("moving", "--nodes", "2-3", **batch, **changes)


def require_each_sample_once(bench: Bench, run: RunDirectory, counts: list[int]) -> None:
    """Check the nodes of each attempt, and the samples of each step that all its ranks have finished."""
    started = jobs.events(run, "started")
    shapes = [(event.nodes, event.accumulation) for event in started]
    assert shapes == [(nodes, 6 // nodes) for nodes in counts], bench.story(run)
    done: set[int] = set()
    for event, (nodes, accumulation) in zip(started, shapes, strict=True):
        ranks = [batches_of(bench, event, rank) for rank in range(nodes)]
        begin = event.step or 0
        for number in range(min(map(len, ranks)) // accumulation):
            step, micro = begin + number, slice(number * accumulation, (number + 1) * accumulation)
            found = [index for batches in ranks for batch in batches[micro] for index in batch]
            positions = np.arange(step * BATCH, (step + 1) * BATCH)
            assert sorted(found) == sorted(samples(positions, 203, seed=3).tolist()), step
            done.add(step)
    assert done == set(range(STEPS))


def batches_of(bench: Bench, started: Event, rank: int) -> list[list[int]]:
    assert started.attempt is not None
    path = bench.folder / f"samples-{started.attempt.owner}-{rank}.jsonl"
    # Each process computes its first micro-batch twice, to lay out DDP's buckets.
    return [json.loads(line) for line in path.read_text().splitlines()][1:]


@pytest.mark.parametrize("counts", [(3, 2), pytest.param((2, 3), marks=pytest.mark.slow)])
def test_a_run_takes_the_free_nodes_at_each_start(bench: Bench, counts: tuple[int, int]) -> None:
    # This job takes two of the four nodes as soon as they are free.
    wait = ["--exclusive", "-N2", "--output=/dev/null", "--wrap", "sleep 600"]
    other = bench.slurm.sbatch(*wait) if counts[0] == 2 else None
    if other is not None:
        bench.slurm.wait_state(other, "RUNNING")
    run = submit(bench)
    with bench.held_at(run, 4):
        if other is not None:
            bench.slurm.run(["scancel", other])
        else:
            # It waits for the end of the attempt, and starts before the requeued run.
            bench.slurm.sbatch(*wait)
        bench.hpcrun("preempt", "moving")
    assert bench.wait_for_end(run) == "COMPLETED", bench.story(run)
    require_each_sample_once(bench, run, [*counts])
    on_two = jobs.events(run, "started")[counts.index(2)].attempt
    assert on_two is not None
    log = (run.attempt_logs(on_two) / "rank-00000.log").read_text()
    assert "hpcrun: 2 of 2-3 nodes: accumulation 3 instead of 2; " in log


@pytest.mark.slow
def test_a_run_continues_without_a_node_and_takes_it_back(bench: Bench) -> None:
    run = submit(bench, model__pause=0.1, checkpoint__every=3)
    bench.wait_for_step(run, 8)
    job = bench.job(run)
    lost = expand(bench.slurm.scontrol_show_job(job)["NodeList"])[-1]
    bench.slurm.cut_link(lost)
    bench.slurm.kill_node(lost)

    def started(count: int) -> bool:
        return len(jobs.events(run, "started")) == count

    bench.wait_until(lambda: started(2), PATIENCE, lambda: bench.story(run))
    with jobs.held(run):
        # The same start of the job, on its two other nodes.
        assert bench.slurm.restarts(job) == 0
        (replaced,) = jobs.events(run, "replaced")
        assert (replaced.lost, replaced.by) == (lost, None)
        bench.slurm.restore_link(lost)
        bench.slurm.revive_node(lost)
        bench.hpcrun("preempt", "moving")
    assert bench.wait_for_end(run) == "COMPLETED", bench.story(run)
    # Slurm may end the rank on the node once more, about a minute after the loss.
    late = bench.causes(run)[2:-1]
    assert late in ([], ["node-failure"]), bench.story(run)
    causes = ["node-failure", "preemption", *late, "finished"]
    assert bench.causes(run) == causes, bench.story(run)
    owners = [f"{job}-0", f"{job}-0.1", f"{job}-1", f"{job}-1.1"][: 3 + len(late)]
    found = [event.attempt.owner for event in jobs.events(run, "started") if event.attempt]
    # Slurm may do so before the attempt trains.
    assert found in (owners, [*owners[:2], owners[-1]]), bench.story(run)
    require_each_sample_once(bench, run, [3, 2, *[3] * (len(found) - 2)])
