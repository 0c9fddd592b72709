"""Node failure: Slurm requeues, the next attempt records the cause, and a stale process does no harm."""

from __future__ import annotations

import pytest

from hpcrun.run.attempt import Attempt
from tests.support import jobs

from .cluster import PATIENCE, VERSION

pytestmark = [pytest.mark.slurm, pytest.mark.lifecycle]


@pytest.mark.parametrize(
    ("fault", "node"),
    [
        ("set_node_down", "node2"),
        pytest.param("set_node_down", "node1", marks=pytest.mark.slow),
        pytest.param("kill_node", "node1", marks=pytest.mark.slow),
        pytest.param("kill_node", "node2", marks=pytest.mark.slow),
        pytest.param("cut_link", "node2", marks=pytest.mark.slow),
        pytest.param("cut_link", "node1", marks=pytest.mark.slow),
    ],
)
def test_the_run_resumes_on_other_nodes_from_its_last_checkpoint(bench, calm, fault, node):
    run = bench.submit("hit", model__pause=0.2, checkpoint__every=5)
    with bench.held_at(run, 12):
        getattr(bench.slurm, fault)(node)
    assert bench.wait_for_end(run) == "COMPLETED", bench.story(run)
    first_cause, *between, last_cause = bench.causes(run)
    # Slurm 24.11 may start the job on two nodes and count one. No step starts there, and the job is requeued.
    assert between in ([], ["node-failure"])
    assert not between or VERSION == "24.11"
    # Slurm notices a cut link at its next ping; the watchdog of the ranks may notice it earlier.
    assert first_cause in (("node-failure", "hang") if fault == "cut_link" else ("node-failure",))
    assert last_cause == "finished"
    assert bench.slurm.restarts(bench.job(run)) == 1 + len(between)
    first, second = jobs.events(run, "started")
    assert (first.step, (second.step or 0) >= 10) == (0, True)
    assert second.step in [event.step for event in jobs.events(run, "saved")]
    assert jobs.final_state(run) == jobs.final_state(calm)


@pytest.mark.slow
def test_a_job_whose_nodes_stay_busy_is_requeued(bench, calm):
    # The step of the set-up has the cores of the job. Slurm 24.11 may also count the nodes of a job wrongly.
    busy = '[ -n "${SLURM_RESTART_COUNT:-}" ] || { srun -n2 sleep 1000 & sleep 3; }'
    run = bench.submit("hit", **{"job.setup": [busy]})
    assert bench.wait_for_end(run, 2 * PATIENCE) == "COMPLETED", bench.story(run)
    assert bench.causes(run) == ["node-failure", "finished"]
    (first, _) = jobs.events(run, "ended")
    assert "Slurm created no step: Requested nodes are busy" in first.reason
    assert bench.slurm.restarts(bench.job(run)) == 1
    assert jobs.final_state(run) == jobs.final_state(calm)


@pytest.mark.slow
def test_a_stale_process_that_continues_to_save_is_superseded(bench, calm):
    # On one node, so that all ranks and the batch script survive Slurm's daemons there.
    run = bench.submit(
        "ghost",
        # The number of threads changes the last bits: use as many per rank as the reference run on two nodes.
        **{"job.nodes": 1, "job.gpus": 4, "job.cpus_per_task": 1},
        model__pause=0.6,
        checkpoint__every=2,
    )
    bench.wait_for_step(run, 5)
    job = bench.job(run)
    orphans = [pid for rank in range(4) for pid in bench.pids(run, rank)]
    assert len(orphans) == 4
    bench.slurm.orphan_node("node1")
    bench.slurm.set_node_down("node1")
    saved = len(jobs.events(run, "saved"))

    def opened() -> list[int]:
        return [event.attempt.restart for event in jobs.events(run, "opened") if event.attempt]

    bench.wait_until(lambda: opened() == [0, 1], PATIENCE, lambda: bench.story(run))
    # The run trained on after Slurm set its node down, and its commits of that time are valid.
    assert len(jobs.events(run, "saved")) > saved
    state = bench.wait_for_end(run)
    assert (state, bench.slurm.restarts(job)) == ("COMPLETED", 1), bench.story(run)
    assert bench.causes(run) == ["node-failure", "finished"]
    # After the new owner looked, the stale process committed nothing.
    begun = jobs.events(run, "started")[1].step or 0
    ghosts = [e.step for e in jobs.events(run, "saved") if e.attempt and not e.attempt.restart]
    assert max(step or 0 for step in ghosts) <= begun
    ghost = (run.attempt_logs(Attempt(job, 0)) / "rank-00000.log").read_text()
    assert f"{job}-1 of cluster " in ghost
    assert f" owns this run now; {job}-0 stops writing" in ghost
    # Its batch script survives too, and srun reports the lost node: the script must not requeue.
    assert "hpcrun: node-failure" in bench.batch_log(run).partition(f"attempt {job}-1")[0]
    assert all(map(jobs.has_ended, orphans))
    assert jobs.final_state(run) == jobs.final_state(calm)
