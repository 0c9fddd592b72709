"""The requeued job and the next submission exclude a node that failed twice."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcrun.run.directory import RunDirectory
from hpcrun.run.files import read_json
from tests.support import jobs

from .cluster import SlurmCluster

pytestmark = pytest.mark.slurm


@pytest.fixture
def folder(slurm: SlurmCluster) -> Iterator[Path]:
    """A project of the job user, with a separate bad-node list."""
    folder = slurm.shared / "bad-nodes"
    slurm.run(["mkdir", "-p", str(folder / "state")])
    slurm.run(["tee", str(folder / "probe.py")], stdin=jobs.PROBE)
    slurm.run(["tee", str(folder / "empty.yaml")], stdin="{}\n")
    yield folder
    slurm.heal()


def hpcrun(slurm: SlurmCluster, folder: Path, *arguments: str) -> str:
    environ = {"XDG_STATE_HOME": str(folder / "state"), "OMP_NUM_THREADS": "1"}
    command = [slurm.python, "-m", "hpcrun", *arguments]
    return slurm.run(command, cwd=folder, env=environ).stdout


def test_a_node_that_fails_twice_is_excluded(slurm: SlurmCluster, folder: Path) -> None:
    ledger = folder / "state" / "hpcrun" / "nodes.jsonl"
    settings = jobs.probe_config(
        folder,
        **{"job.nodes": 1, "job.gpus": 2, "job.executor": "slurm", "model.pause": 0.05},
        **{"train.steps": 60, "job.time": "5:00"},
    )
    told = json.loads(
        hpcrun(slurm, folder, "submit", "-c", "empty.yaml", "--name", "run", "--json", *settings)
    )
    run = RunDirectory(Path(told["run"]))
    # The first failure was in another run.
    add_failure = (
        "import sys; from pathlib import Path; from hpcrun.slurm.avoided_nodes import add_failure;"
        "add_failure(Path(sys.argv[1]), sys.argv[2], 'killed by SIGBUS', 'another run', cluster=sys.argv[3])"
    )
    with jobs.held_at(run, 20):
        node = slurm.scontrol_show_job(told["job_id"])["NodeList"]
        # A node of this name on another cluster with the same home is another node.
        other = next(one for one in slurm.nodes if one != node)
        for name, host in ((slurm.name, node), ("elsewhere", other), ("elsewhere", other)):
            slurm.run([slurm.python, "-c", add_failure, str(ledger), host, name])
        os.kill(next(filter(jobs.is_rank, slurm.processes(node))), signal.SIGKILL)

    slurm.wait_restarts(told["job_id"], 1)
    shown = slurm.scontrol_show_job(told["job_id"])
    log = (run.logs / f"batch-{told['job_id']}.log").read_text()
    assert shown["ExcNodeList"] == node, log
    assert shown["NodeList"] != node
    assert [event.hosts for event in jobs.events(run, "excluded")] == [[node]]
    jobs.wait_for(lambda: (read_json(run.result) or {}).get("state") == "finished")

    dry = hpcrun(
        slurm, folder, "submit", "-c", "empty.yaml", "--name", "next", "--dry-run", *settings
    )
    assert f"#SBATCH --exclude={node}\n" in dry
