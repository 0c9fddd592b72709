"""Every way to start ranks without a scheduler trains, and ends with the same weights."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hpcrun.run.attempt import Attempt
from hpcrun.run.directory import RunDirectory
from tests.support import jobs
from tests.support.journal import record_event

TOOLS = Path(__file__).resolve().parents[3] / "tools"
TWO = {"job.nodes": 1, "job.gpus": 2, "train.steps": 12, "optim.warmup_steps": 2}


def prepare(folder: Path, name: str, **changes: object) -> RunDirectory:
    """Prepare a run of the probe task for two ranks, without starting it."""
    jobs.write_probe(folder)
    (folder / "empty.yaml").write_text("{}\n")
    settings = jobs.probe_config(folder, **TWO | changes)
    done = jobs.hpcrun(
        *("submit", "--prepare", "-c", "empty.yaml", "--name", name, "--no-snapshot", *settings),
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    assert "is ready; submit it with\n" in done.stdout
    return RunDirectory(folder / "runs" / name)


def begin(folder: Path, *command: str) -> "subprocess.Popen[bytes]":
    """Start Python with ``command`` in ``folder``, with the probe's sample log where the probe expects it."""
    environ = os.environ | {"PYTHON": sys.executable, "SLURM_JOB_ID": ""}
    return subprocess.Popen(command, cwd=folder, env=environ)


def told_by(folder: Path, *command: str) -> str:
    """Start ``command`` as :func:`begin` does, require success, and return its output."""
    environ = os.environ | {"PYTHON": sys.executable, "SLURM_JOB_ID": ""}
    done = subprocess.run(
        command, cwd=folder, env=environ, stdout=subprocess.PIPE, text=True, check=True,
        timeout=jobs.PATIENCE,
    )  # fmt: skip
    return done.stdout


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the final state from the local cluster, which the test of the main job has verified."""
    folder = tmp_path_factory.mktemp("trained")
    run = jobs.submit_probe(folder, "calm", **TWO)
    jobs.wait_for_end(run)
    return jobs.final_state(run)


def test_plain_python_trains_a_run_of_one_rank(tmp_path: Path) -> None:
    run = prepare(tmp_path, "alone", job__gpus=1)
    worker = (sys.executable, "-m", "hpcrun.worker", str(run.path))
    assert begin(tmp_path, *worker).wait(jobs.PATIENCE) == 0
    assert jobs.result(run)["state"] == "finished"


SPAWN = """
import sys
import torch, torch.distributed as dist, torch.multiprocessing as mp
from hpcrun.ranks.distributed import DistributedConfig
from hpcrun.train.parallel.process_group import cleanup_distributed, setup_distributed


def rank(number, ranks, port):
    config = DistributedConfig(
        world_size=ranks, rank=number, local_rank=number, num_gpus_per_node=ranks,
        master_port=port, launch_method="spawn",
    )
    config.validate()
    setup_distributed(config)
    total = torch.tensor([float(number + 1)])
    dist.all_reduce(total)
    assert total.item() == 3.0, total
    cleanup_distributed()


if __name__ == "__main__":
    mp.spawn(rank, args=(2, int(sys.argv[1])), nprocs=2)
    print("spawned")
"""


def test_ranks_of_mp_spawn_join_by_a_config(tmp_path: Path, free_port: int) -> None:
    (tmp_path / "spawn.py").write_text(SPAWN)
    done = subprocess.run(
        [sys.executable, "spawn.py", str(free_port)],
        cwd=tmp_path, capture_output=True, text=True, timeout=jobs.PATIENCE, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "spawned\n"), done.stderr


# CI does the same on two hosts: tests/tools/test_multinode.py.
@pytest.mark.slow
def test_the_torchrun_tool_is_interrupted_and_continued(
    tmp_path: Path, trained: dict[str, str]
) -> None:
    jobs.write_probe(tmp_path)
    (tmp_path / "probe.yaml").write_text("{}\n")
    settings = [
        word
        for word in jobs.probe_config(tmp_path, **TWO | {"model.pause": 0.05})
        if not word.startswith("job.")
    ]
    line = (
        *(str(TOOLS / "train_dist_torchrun.sh"), "--num_gpus", "2", "--config", "probe.yaml"),
        *("--cpu", *settings),
    )
    run = RunDirectory(tmp_path / "runs" / "probe")
    first = begin(tmp_path, *line)
    with jobs.held_at(run, 2):
        assert '"state": "running"' in jobs.hpcrun("status", "--json", "probe", cwd=tmp_path).stdout
        refused = jobs.hpcrun("cancel", "probe", cwd=tmp_path)
        assert refused.returncode == 2
        assert "in the terminal that started it); end it there with Ctrl-C" in refused.stderr
        first.send_signal(signal.SIGINT)
    first.wait(jobs.PATIENCE)
    assert jobs.result(run)["state"] == "cancelled", jobs.result(run)
    second = told_by(tmp_path, *line)
    assert [event.cause for event in jobs.events(run, "ended")] == ["cancelled", "finished"]
    assert jobs.final_state(run) == trained
    for shown in (second, jobs.hpcrun("logs", "probe", cwd=tmp_path).stdout):
        assert re.search(r"step 12/12: loss \d+\.\d{4}, samples/s [\d,]+, ETA 00:00$", shown, re.M)
        assert re.search(rf"  result +{re.escape(str(run.result))}$", shown, re.M)
    assert jobs.hpcrun("logs", "probe", "--rank", "1", cwd=tmp_path).returncode == 0
    assert "is finished already" in told_by(tmp_path, *line)


def test_a_failure_under_another_hosts_torchrun_is_the_runs_cause(
    tmp_path: Path, free_port: int
) -> None:
    fault = {"rank": 1, "call": 3}
    run = prepare(tmp_path, "apart", job__nodes=2, job__gpus=1, model__fault=fault)
    torchrun = (
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"),
        *("--master-addr=127.0.0.1", f"--master-port={free_port}", "--max-restarts=0"),
    )
    # One host or two: the starter of a host's ranks is a separate process.
    hosts = [
        begin(tmp_path, *torchrun, f"--node-rank={node}", "-m", "hpcrun.worker", str(run.path))
        for node in (1, 0)
    ]
    codes = [host.wait(jobs.PATIENCE) for host in hosts]
    assert all(codes)
    (ended,) = jobs.events(run, "ended")
    assert ended.cause == "crash"
    assert "rank 1 on" in jobs.result(run)["reason"]
    assert "ValueError: the data of call 3 is broken" in jobs.result(run)["reason"]
    assert ended.attempt is not None
    (folder,) = (path for path in run.logs.iterdir() if path.name.startswith("pid"))
    assert folder == run.job_logs(ended.attempt.job)


def test_variables_set_by_hand_start_the_ranks_of_two_hosts(
    tmp_path: Path, trained: dict[str, str], free_port: int
) -> None:
    run = prepare(tmp_path, "exported", model__pause=0.05)

    def start(rank: int) -> "subprocess.Popen[str]":
        place = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
        variables = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": free_port,
            "SLURM_JOB_ID": "",
            **place,
        }
        return subprocess.Popen(
            [sys.executable, "-m", "hpcrun.worker", str(run.path)],
            cwd=tmp_path,
            env=os.environ | {name: str(value) for name, value in variables.items()},
            stderr=subprocess.PIPE,
            text=True,
        )

    # Another host had the run, and is gone.
    gone = Attempt("pid7", 0)
    record_event(run, "opened", attempt=gone, executor="direct", host="host9", pid=7)
    refused = jobs.hpcrun("cancel", "exported", cwd=tmp_path)
    assert "runs on host9, according to its files" in refused.stderr
    assert "if that host is gone, write it off with `hpcrun cancel --now`" in refused.stderr
    assert "host9 is written off" in jobs.hpcrun("cancel", "--now", "exported", cwd=tmp_path).stdout
    hosts = [start(1), start(0)]
    with jobs.held_at(run, 1):
        twin = start(1)
        told = twin.communicate(timeout=jobs.PATIENCE)[1].splitlines()
    assert twin.returncode == 2, told
    assert f"hpcrun: rank 1 at 127.0.0.1 port {free_port} is " in told[-1]
    assert "already: this run is live, or two hosts have the same node rank" in told[-1]
    assert [host.wait(jobs.PATIENCE) for host in hosts] == [0, 0]
    assert jobs.final_state(run) == trained
