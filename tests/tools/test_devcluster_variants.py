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
def test_sacct_shows_every_attempt_and_its_end(variant):
    victim = variant.sbatch("-N2", "--exclusive", "--requeue", "--wrap", "srun sleep 300")
    variant.wait_state(victim, "RUNNING")
    variant.run(["srun", "-p", "urgent", "-N2", "--exclusive", "true"])
    variant.wait_restarts(victim, 1)
    variant.wait_until(lambda: variant.state(victim) == "RUNNING")
    variant.run(["scancel", victim])
    uid = variant.run(["id", "-u"]).stdout.strip()
    has_rows(variant, victim, ["PREEMPTED", f"CANCELLED by {uid}"])


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
def test_all_hosts_see_the_same_shared_file_system(variant):
    kinds = variant.run(["srun", "-N2", "stat", "-f", "-c", "%T", "."]).stdout.split()
    assert kinds == ["fuseblk"] * 2
    variant.run(["sh", "-c", "echo from-node1 > note; sync note"], host="node1")
    assert variant.run(["cat", "note"], host="node2").stdout == "from-node1\n"
    assert (variant.seen / "note").read_text() == "from-node1\n"
    variant.run(["sh", "-c", "mv note kept"], host="node2")
    assert variant.run(["ls"], host="node1").stdout == "kept\n"


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


TRAP = (
    "#!/bin/bash\n"
    "srun --overlap bash -c '"
    'for s in USR2 TERM CONT; do trap "echo task $s >> signals-$SLURM_RESTART_COUNT" $s; done; '
    "touch started; for i in $(seq 300); do sleep 0.1; done'\n"
)


@pytest.mark.parametrize(
    ("variant", "first"),
    [
        ({"grace_s": 4}, {"TERM", "CONT"}),
        ({"grace_s": 4, "preempt_user_signal": True}, {"USR2", "CONT"}),
    ],
    indirect=["variant"],
)
def test_a_preempted_task_gets_the_variants_signal(variant, first):
    job = variant.sbatch(
        "-N2", "--exclusive", "--requeue", "--signal=USR2@30", "--ntasks=2", script=TRAP
    )
    variant.wait_until((variant.shared / "started").exists)
    urgent = variant.popen(["srun", "-p", "urgent", "-N2", "--exclusive", "true"])
    record = variant.shared / "signals-"
    variant.wait_until(record.exists)
    variant.wait_until(lambda: len(record.read_text().split()) >= 8, explain=record.read_text)
    seen = record.read_text().split("\n")
    assert {line.removeprefix("task ") for line in seen[:4]} == first
    urgent.communicate(timeout=300)
    variant.wait_restarts(job, 1)


@pytest.mark.parametrize("variant", [{"realistic": True}], indirect=True)
def test_realistic_has_slurms_own_delays(variant):
    told = variant.admin("scontrol", "show", "config")
    settings = {
        line.partition("=")[0].strip(): line.partition("=")[2] for line in told.splitlines()
    }
    assert settings["SlurmdTimeout"].strip() == "300 sec"
    assert settings["KillWait"].strip() == "30 sec"
    assert "cred_expire" not in settings["AuthInfo"]
