"""Other kinds of clusters: no GPU GRES, typed GPUs, the shell's default cluster."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcrun import slurm as commands
from hpcrun.run.directory import RunDirectory
from tests.support import jobs

from .cluster import SlurmCluster
from .separate_cluster import running

pytestmark = pytest.mark.slurm

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def plain() -> Iterator[SlurmCluster]:
    yield from running("plain", nodes=2, gpus=(0,))


@pytest.fixture(scope="module")
def typed() -> Iterator[SlurmCluster]:
    yield from running("typed", nodes=2, gpus=(4, 2), gpu_types=("a100", "h100"))


def hpcrun(
    on: SlurmCluster, *arguments: str, env: dict[str, str] | None = None, check: bool = True
) -> subprocess.CompletedProcess[str]:
    command = [on.python, "-m", "hpcrun", *arguments]
    return on.run(command, cwd=on.shared, env=env or {}, check=check)


def submit(
    on: SlurmCluster,
    name: str,
    *options: str,
    env: dict[str, str] | None = None,
    command: str = "env",
) -> str:
    """Submit a run, by default with ranks that print their environment, and return its job."""
    arguments = ["submit", "--name", name, "--json", "job.executor=slurm", *options]
    done = hpcrun(on, *arguments, "--", "bash", "-c", command, env=env)
    return str(json.loads(done.stdout)["job_id"])


def seen_by_rank_0(on: SlurmCluster, name: str, job: str) -> dict[str, str]:
    log = on.shared / "runs" / name / "logs" / job / "restart-0" / "rank-00000.log"
    lines = [line.partition("=") for line in log.read_text().splitlines()]
    return {key: value for key, equals, value in lines if equals}


def test_no_gpu_is_requested_without_a_gpu_gres(plain: SlurmCluster) -> None:
    dry = hpcrun(plain, "submit", "--name", "dry", "--gpus", "2", "--dry-run", "--", "env")
    assert "--gpus-per-node" not in dry.stdout
    assert "no node has a gpu GRES" in dry.stderr
    refused = hpcrun(
        plain, "submit", "--name", "typed", "--gpus", "a100:2", "--", "env", check=False
    )
    assert refused.returncode == 2
    assert "are not known to Slurm; omit a100" in refused.stderr
    assert not (plain.shared / "runs" / "typed").exists()


def test_without_slurms_gpu_counts_ranks_must_find_a_gpu(
    plain: SlurmCluster,
) -> None:
    blind = submit(plain, "blind", "--gpus", "2")
    cpu = submit(plain, "cpu", "--gpus", "2", "--cpu")
    # Like a node with GPUs.
    seeing = submit(plain, "seeing", "--gpus", "2", 'job.env={CUDA_VISIBLE_DEVICES: "0,1"}')
    assert [plain.wait_state(job) for job in (cpu, seeing)] == ["COMPLETED", "COMPLETED"]
    assert plain.wait_state(blind) == "FAILED"
    run = RunDirectory(plain.shared / "runs" / "blind")
    assert [event.cause for event in jobs.events(run, "ended")] == ["bad-input"]
    reason = jobs.result(run)["reason"]
    assert "the job is for GPUs, Slurm gave it none here, and none is visible" in reason
    assert "to train on CPUs submit with --cpu" in reason


@pytest.mark.parametrize("form", ["gpus-per-node", "gres"])
def test_typed_gpus_are_requested_in_each_form(typed: SlurmCluster, form: str) -> None:
    job = submit(typed, form, "--gpus", "h100:2", f"job.gpu_request={form}")
    assert typed.wait_state(job) == "COMPLETED"
    shown = typed.scontrol_show_job(job)
    assert shown["NodeList"] == "node2"
    # The share of both GPUs of the node is the whole node: 16 CPUs and 64000 MB.
    assert shown["NumCPUs"] == "16"
    assert shown["MinMemoryNode"] == "62.50G"
    seen = seen_by_rank_0(typed, form, job)
    assert seen["SLURM_CPUS_PER_TASK"] == "8"
    assert seen["CUDA_VISIBLE_DEVICES"] == "0,1"


def test_the_dry_run_shows_the_submitted_request(typed: SlurmCluster) -> None:
    arguments = ["submit", "--name", "same", "--gpus", "a100:1", "job.executor=slurm"]
    dry = hpcrun(typed, *arguments, "--dry-run", "--json", "--", "env")
    assert "requests 4 CPUs per rank and 16000M of memory per node" in dry.stderr
    done = hpcrun(typed, *arguments, "--json", "--", "env")
    folder = typed.shared / "runs" / "same" / "logs" / "submitit"
    job = json.loads(done.stdout)["job_id"]
    (sent,) = folder.glob(f"{job}*.sh")
    assert sent.read_text() == json.loads(dry.stdout)["script"]
    assert typed.wait_state(job) == "COMPLETED"


def test_a_type_that_the_partition_lacks_is_refused(typed: SlurmCluster) -> None:
    done = hpcrun(typed, "submit", "--name", "v", "--gpus", "v100:1", "--", "env", check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "no node of this cluster has GPUs of type v100; there are: a100, h100" in done.stderr


def test_a_run_prepares_both_nodes_before_its_ranks(typed: SlurmCluster) -> None:
    lines = '["echo ready > /tmp/prepared-$SLURM_CLUSTER_NAME-$SLURMD_NODENAME"]'
    command = 'cat "/tmp/prepared-$SLURM_CLUSTER_NAME-$SLURMD_NODENAME"'
    job = submit(
        typed, "staged", "--nodes", "2", "--cpu", f"job.node_setup={lines}", command=command
    )
    assert typed.wait_state(job) == "COMPLETED"
    logs = typed.shared / "runs" / "staged" / "logs" / job / "restart-0"
    assert "ready" in (logs / "rank-00001.log").read_text()


def test_another_job_with_the_same_id_is_never_canceled(typed: SlurmCluster) -> None:
    job = submit(typed, "reused", "job.sbatch_args=[--hold]")
    run = RunDirectory(Path(typed.shared / "runs" / "reused"))
    typed.run(["scontrol", "update", f"jobid={job}", "jobname=renamed"])
    # A person may rename a job; it still runs the script of the run.
    assert "it is held" in hpcrun(typed, "status", "reused").stdout
    typed.run(["scancel", job])
    typed.wait_state(job)
    stranger = typed.sbatch("--hold", "--job-name=other", "--wrap=true")
    # As after a new installation of the cluster, which counts job ids from 1 again.
    # Without the checksums, which would not be right.
    log = re.sub(r',"_crc32":"[0-9a-f]{8}"', "", run.events.read_text())
    log = log.replace(f'"{job}"', f'"{stranger}"')
    typed.run(["tee", str(run.events)], stdin=log)
    assert "it is held" not in hpcrun(typed, "status", "reused").stdout
    refused = hpcrun(typed, "cancel", "reused", check=False)
    assert refused.returncode != 0
    assert "is not running" in refused.stderr
    assert typed.state(stranger) == "PENDING"
    assert commands.parse_squeue(typed.admin(*commands.squeue_command([stranger])))
    typed.run(["scancel", stranger])
