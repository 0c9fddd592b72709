"""One command submits a training on several hosts, and every command can follow it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcrun.run.attempt import Attempt
from hpcrun.run.directory import RunDirectory
from hpcrun.run.files import read_json
from tests.support import jobs

from .training import Bench

pytestmark = pytest.mark.slurm


def address(bench: Bench, host: str) -> str:
    """Return the host's address in the cluster's network."""
    told = bench.slurm.run(["getent", "hosts", host]).stdout
    return told.split()[0]


def test_the_main_command_trains_on_two_hosts_over_their_network(bench):
    settings = bench.settings(
        **{"task": "probe:Watched", "job.gpus": 2, "job.sbatch_args": ["--gres=gpu:4"]}
    )
    submitted = bench.slurm.run(
        [
            *(sys.executable, "-m", "hpcrun.submit", "-c", "empty.yaml", "--name", "wide"),
            *("--nodes", "2", "--gpus", "2", *settings),
        ],
        cwd=bench.folder,
        env=bench.environ({"NCCL_IB_HCA": "mlx5_0,mlx5_1"}),
    )
    run = bench.run("wide")
    job = bench.job(run)
    for expected in (
        f"hpcrun: wide is job {job} (slurm)",
        f"run directory  {run.path}",
        "hpcrun logs -f wide",
        "hpcrun status wide",
        "hpcrun cancel wide",
        "hpcrun resume wide",
    ):
        assert expected in submitted.stdout
    followed = bench.hpcrun("logs", "-f", "wide")
    assert bench.wait_for_end(run) == "COMPLETED", bench.story(run)
    assert "wide: starting at step 0, 4 ranks" in followed.stdout
    seen = [bench.facts(rank) for rank in range(4)]
    # A job of an earlier test may still occupy a node.
    near, _, far, _ = hosts = [one["host"] for one in seen]
    assert near < far
    assert hosts == [near, near, far, far]
    first, second = address(bench, near), address(bench, far)
    for rank, own in enumerate((first, first, second, second)):
        # Also between ranks of one host: gloo binds the node's address, not loopback.
        assert seen[rank]["own"] == [own]
        assert {first, second} <= {*seen[rank]["peers"], own}
        environ = seen[rank]["environ"]
        assert (environ["RANK"], environ["MASTER_ADDR"]) == (str(rank), near)
        assert environ["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
        assert environ["NCCL_IB_HCA"] == "mlx5_0,mlx5_1"
    (row,) = [json.loads(line) for line in bench.hpcrun("status", "--json").stdout.splitlines()]
    assert (row["state"], row["executor"], row["job"]) == ("finished", "slurm", job)


def test_follow_shows_a_slurm_run_to_its_end(bench, calm):
    told = bench.hpcrun(*bench.arguments("seen", "--follow"))
    assert "hpcrun: seen is finished" in told.stdout
    assert read_json(bench.run("seen").result) == {
        **bench.result(calm),
        "time": bench.result(bench.run("seen"))["time"],
        "goodput": bench.result(bench.run("seen"))["goodput"],
    }


@pytest.fixture
def own_names_on_loopback(bench) -> Iterator[None]:
    """Nodes with Debian's hosts file: 127.0.1.1 for their own name, an address for every other name."""
    text = bench.slurm.run(["cat", "/etc/hosts"]).stdout
    nodes = bench.slurm.nodes[:2]
    for node in nodes:
        others = [line for line in text.splitlines() if line.split()[1:] != [node]]
        hosts = bench.folder / f"hosts-{node}"
        hosts.write_text("\n".join([*others, f"127.0.1.1 {node}"]) + "\n")
        bench.slurm.run(["mount", "--bind", str(hosts), "/etc/hosts"], host=node, user="root")
    yield
    for node in nodes:
        bench.slurm.run(["umount", "/etc/hosts"], host=node, user="root")


def test_nodes_whose_own_name_is_loopback_find_each_other(bench, own_names_on_loopback):
    run = bench.submit("debian", task="probe:Watched")
    assert bench.wait_for_end(run) == "COMPLETED", bench.story(run)
    first, second = address(bench, "node1"), address(bench, "node2")
    for rank, own in enumerate((first, second)):
        assert bench.facts(rank)["own"] == [own]
    assert bench.facts(1)["environ"]["MASTER_ADDR"] == first


HOSTILE = "a place; $(touch owned) `touch owned` 'quoted\" 100% ünïcødé & #1"


def test_special_characters_in_paths_and_variables_have_no_effect(slurm):
    bench = Bench(slurm, HOSTILE)
    hostile = "mlx5_0,mlx5_1; $(touch owned) 'x' \"y\" %j \\ ü"
    run = bench.submit(
        "ünïcode@1",
        **{"task": "probe:Watched", "job.env": {"NCCL_IB_HCA": "mlx5_0,mlx5_1", "ODD": hostile}},
    )
    assert bench.wait_for_end(run) == "COMPLETED", bench.story(run)
    environ = bench.facts(1)["environ"]
    assert environ["NCCL_IB_HCA"] == "mlx5_0,mlx5_1"
    assert environ["ODD"] == hostile
    assert "hpcrun: attempt" in bench.batch_log(run)
    logs = run.attempt_logs(Attempt(bench.job(run), 0))
    assert len(list(logs.glob("rank-0000[01].log"))) == 2
    assert "resumed" not in bench.hpcrun("logs", "ünïcode@1").stdout
    assert not list(slurm.shared.rglob("owned"))
    assert not Path("owned").exists()
    bench.remove()


@pytest.mark.parametrize("sign", ["%j", "%5N", "\\"])
def test_a_path_that_slurm_would_interpret_is_refused(bench, sign):
    place = f"runs{sign}"
    done = bench.hpcrun(*bench.arguments("odd", "--runs-dir", place), check=False)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "by other text; choose a path without it" in line
    assert not bench.slurm.squeue("--name=odd")


def test_a_submission_inside_a_job_inherits_no_variable(bench):
    outer = bench.folder / "outer.sh"
    words = bench.arguments("inner", "--nodes", "1", task="probe:Watched", job__gpus=2)
    (bench.folder / "words").write_text("\0".join(words))
    outer.write_text(
        "#!/bin/bash\n"
        "#SBATCH -N1 -n3 --cpus-per-task=3 --job-name=outer --output=outer.log --time=55\n"
        "export SBATCH_PARTITION=urgent SLURM_CPU_BIND=map_cpu:0 RANK=5 WORLD_SIZE=6 LOCAL_RANK=1\n"
        f"xargs -0 {sys.executable} -m hpcrun < words\n"
    )
    job = bench.slurm.sbatch(str(outer), cwd=bench.folder, env=bench.environ())
    assert bench.slurm.wait_state(job) == "COMPLETED", (bench.folder / "outer.log").read_text()
    run = bench.run("inner")
    assert bench.wait_for_end(run) == "COMPLETED", bench.story(run)
    shown = bench.slurm.scontrol_show_job(bench.job(run))
    assert (shown["Partition"], shown["CPUs/Task"]) == ("batch", "1")
    assert shown["TimeLimit"] != "00:55:00"
    environ = bench.facts(1)["environ"]
    assert (environ["RANK"], environ["WORLD_SIZE"]) == ("1", "2")
    assert environ["SLURM_JOB_NAME"] == "inner"
    assert environ["SLURM_JOB_ID"] != job


def test_status_asks_squeue_once_or_works_without_a_controller(bench):
    held = {"job.sbatch_args": ["--hold"]}
    runs: list[RunDirectory] = [bench.submit(f"held-{k}", **held) for k in range(3)]
    counted = bench.folder / "bin"
    counted.mkdir()
    for program in ("squeue", "sacct"):
        real = bench.slurm.run(["which", program]).stdout.strip()
        wrapper = counted / program
        wrapper.write_text(
            f'#!/bin/sh\necho {program} >> "{bench.folder}/asked"\nexec {real} "$@"\n'
        )
        wrapper.chmod(0o755)
    (bench.folder / "asked").touch(mode=0o666)
    (bench.folder / "asked").chmod(0o666)
    path = bench.slurm.run(["sh", "-c", "echo $PATH"]).stdout.strip()
    counting = {"PATH": f"{counted}:{path}"}
    told = bench.hpcrun("status", env=counting).stdout
    assert told.count("it is held") == 3
    assert (bench.folder / "asked").read_text().split() == ["squeue"]
    # This cluster has no accounting, so sacct does not answer.
    bench.slurm.stop_daemon("slurmctld")
    try:
        without = bench.hpcrun("status", env=counting).stdout
    finally:
        bench.slurm.start_daemon("slurmctld")
    assert without.count("Slurm does not answer now") == 3
    assert without.count("waiting; ") == 3
    assert (bench.folder / "asked").read_text().split() == ["squeue", "squeue", "sacct"]
    for run in runs:
        done = bench.hpcrun("cancel", run.name)
        assert "cancelled while it waited" in done.stdout
        assert "continues it" in done.stdout
    assert bench.hpcrun("status").stdout.count("cancelled") == 3


def test_a_job_of_another_cluster_is_not_confused(bench):
    run = bench.submit("away", **{"job.sbatch_args": ["--hold"]})
    theirs = bench.job(run)
    # Like a submission from another cluster that shares the folder.
    jobs.replace_in_lines(run.events, f'"{bench.slurm.name}"', '"elsewhere"')
    assert "on cluster elsewhere" in bench.hpcrun("status", "away").stdout
    for command in ("cancel", "resume"):
        refused = bench.hpcrun(command, "away", check=False)
        assert refused.returncode == 2, refused.stdout
        assert f"job {theirs} " in refused.stderr
        assert "on cluster elsewhere" in refused.stderr
    assert "is written off" in bench.hpcrun("cancel", "--now", "away").stdout
    assert bench.slurm.state(theirs) == "PENDING"
    bench.hpcrun("resume", "away")
    assert bench.job(run) != theirs
    assert "it is held" in bench.hpcrun("status", "away").stdout
    bench.hpcrun("cancel", "away")
    bench.slurm.run(["scancel", theirs])
