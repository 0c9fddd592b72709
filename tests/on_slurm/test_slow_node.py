"""A slow node of a real job: named by the ranks, left at the next save, excluded by the requeue."""

import pytest

from hpcrun.run.slow_nodes import slow_nodes
from tests.support import jobs

from .training import Bench

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

SLOWED = '''


class Slowed(Probe):
    """Compute longer on one node."""

    def note(self, indices):
        if os.environ["SLURMD_NODENAME"] == self.config.model.own["slow"]:
            time.sleep(0.03)
'''
SETTINGS = {
    **{"job__nodes": 2, "task": "probe:Slowed", "model__slow": "node2", "train__steps": 300},
    **{"train__log_every": 10, "checkpoint__every": 100, "train__validate_every": 0},
}


def test_the_requeue_leaves_a_slow_node_and_the_bits(bench: Bench) -> None:
    probe = bench.folder / "probe.py"
    probe.write_text(probe.read_text() + SLOWED)
    probe.chmod(0o644)
    run = bench.submit("left", **SETTINGS, restarts__replace_slow=True)
    job = bench.job(run)
    assert bench.wait_for_end(run) == "COMPLETED", bench.story(run)
    assert bench.causes(run) == ["node-failure", "finished"], bench.story(run)
    assert [one.host for one in slow_nodes(jobs.read_events(run))] == ["node2"]
    (stop,) = jobs.events(run, "stopped")
    assert (stop.cause, stop.step, stop.hosts) == ("slow-node", 200, ["node2"])
    assert [event.hosts for event in jobs.events(run, "excluded")] == [["node2"]]
    assert bench.slurm.restarts(job) == 1
    calm = bench.submit("calm", **(SETTINGS | {"model__slow": "none"}))
    assert bench.wait_for_end(calm) == "COMPLETED", bench.story(calm)
    assert jobs.events(calm, "slow") == []
    assert jobs.final_state(run) == jobs.final_state(calm)
