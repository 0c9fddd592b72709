"""Clusters with more packages or longer delays: accounting, shared file systems, kinds of preemption."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from ..on_slurm import cluster as slurm_cluster
from ..on_slurm.conftest import unavailable

# The helper of the Slurm tests puts the tool's modules on the path.
from devclusterlib.spec import ClusterSpec  # isort: skip

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


@pytest.fixture
def variant(request: pytest.FixtureRequest) -> Iterator[slurm_cluster.SlurmCluster]:
    """A cluster of two nodes with the options of the test."""
    options = {"nodes": 2, **request.param}
    if (reason := slurm_cluster.why_not(ClusterSpec(**options))) is not None:
        features = [
            str(options.get("shared_fs")),
            *(["accounting"] if "accounting" in options else []),
        ]
        unavailable(reason, features=features)
    name = f"variant-{os.getpid()}"
    try:
        yield slurm_cluster.start(name, **options)
    finally:
        slurm_cluster.stop(name)


def has_rows(slurm: slurm_cluster.SlurmCluster, job: str, states: list[str]) -> None:
    """Wait until sacct shows ``states``, a row per attempt: slurmctld sends them in batches."""
    slurm.wait_until(
        lambda: [row["State"] for row in slurm.sacct(job)] == states,
        explain=lambda: f"sacct says {slurm.sacct(job)}",
    )


@pytest.mark.parametrize("variant", [{"accounting": True}], indirect=True)
def test_jobs_run_without_the_accounting_daemon_and_are_recorded_later(variant):
    variant.stop_daemon("slurmdbd")
    assert variant.run(["sacct"], check=False).returncode != 0
    job = variant.sbatch("--wrap", "exit 3")
    assert variant.wait_state(job) == "FAILED"
    variant.start_daemon("slurmdbd")
    has_rows(variant, job, ["FAILED"])


LOCK = (
    "import fcntl, sys\n"
    "f = open('lock', 'w')\n"
    "try: fcntl.lockf(f, fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
    "except OSError: print('held'); sys.exit()\n"
    "print('taken', flush=True); sys.stdin.read()\n"
)


@pytest.mark.parametrize("variant", [{"shared_fs": "gluster"}], indirect=True)
def test_a_node_that_lost_power_comes_back_with_its_mount(variant):
    variant.kill_node("node2")
    assert variant.run(["ls"], host="node1").stdout == ""
    variant.revive_node("node2")
    assert variant.run(["srun", "-wnode2", "pwd"]).stdout == f"{variant.shared}\n"


@pytest.mark.parametrize("variant", [{"shared_fs": "gluster"}], indirect=True)
def test_a_lock_is_seen_from_another_node(variant):
    holder = variant.popen(["sh", "-c", f'sleep 300 | python3 -c "{LOCK}"'], host="node1")
    assert holder.stdout is not None
    assert holder.stdout.readline() == "taken\n"
    assert variant.run(["python3", "-c", LOCK], host="node2").stdout == "held\n"
    variant.stop_daemon("glusterfsd")
    failed = variant.run(["ls"], host="node2", check=False)
    assert "not connected" in failed.stderr
    variant.start_daemon("glusterfsd")
    variant.wait_until(lambda: variant.run(["ls"], host="node2", check=False).returncode == 0)


@pytest.mark.parametrize("variant", [{"realistic": True}], indirect=True)
def test_realistic_has_slurms_own_delays(variant):
    told = variant.admin("scontrol", "show", "config")
    settings = {
        line.partition("=")[0].strip(): line.partition("=")[2] for line in told.splitlines()
    }
    assert settings["SlurmdTimeout"].strip() == "300 sec"
    assert settings["KillWait"].strip() == "30 sec"
    assert "cred_expire" not in settings["AuthInfo"]
