"""torchrun on several hosts of the dev cluster without a scheduler, each with a separate network."""

from __future__ import annotations

import pytest

from hpcrun.run.directory import RunDirectory
from tests import jobs

from .cluster import PATIENCE, SlurmCluster
from .scripts import SBATCH, Bench

pytestmark = [pytest.mark.slurm, pytest.mark.slow]
TOOL = SBATCH.parent / "tools" / "train_multinode.sh"


def test_the_multinode_tool_trains_one_run_on_two_hosts(
    slurm: SlurmCluster,
) -> None:
    bench = Bench(slurm)
    run = RunDirectory(bench.folder / "runs" / "pair")
    changes = {"train.steps": 30, "model.pause": 0.1}
    settings = [word for word in jobs.probe_config(bench.folder, **changes) if word[:4] != "job."]
    shape = ("--num_nodes=2", "--num_gpus", "2", "--master_addr", "node2", "--master_port=23456")
    what = ("--cpu", "--name", "pair", "--no-snapshot", "--config", "empty.yaml", *settings)
    # The probe task of the tests needs a job id.
    env = {**bench.environment(), "SLURM_JOB_ID": ""}

    def start() -> list[int]:
        """Run the command on both hosts; return the exit codes."""
        hosts = [
            slurm.popen(
                [str(TOOL), *shape, f"--node_rank={rank}", *what],
                host=f"node{2 - rank}", cwd=bench.folder, env=env,
            )
            for rank in (1, 0)
        ]  # fmt: skip
        if not run.metrics.exists():
            bench.wait_for_step(run, 3)
            assert "node2" in bench.hpcrun("cancel", "pair", check=False)
            slurm.run(
                [slurm.python, "-m", "hpcrun", "cancel", "pair"],
                host="node2", cwd=bench.folder, env=env,
            )  # fmt: skip
        return [host.wait(PATIENCE) for host in hosts]

    assert all(start()), bench.told(run)
    assert jobs.result(run)["state"] == "cancelled"
    assert start() == [0, 0], bench.told(run)
    ends = [event.cause for event in jobs.events(run, "ended")]
    assert (jobs.result(run)["state"], ends) == ("finished", ["cancelled", "finished"])
