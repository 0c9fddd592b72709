"""Spare nodes from the submission to the end of an attempt, with substitutes for Slurm's programs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpcrun.cli.main import guarded
from hpcrun.config import Config, Job, override_layer, resolve
from hpcrun.errors import LaunchError, UserError
from hpcrun.job.opening import open_attempt
from hpcrun.job.policy import Budgets
from hpcrun.run.attempt import Attempt
from hpcrun.run.directory import create
from hpcrun.slurm.launch.batch_script import sbatch_lines
from hpcrun.slurm.launch.planned import choose_executor
from tests.support.journal import record_event

from .step_substitutes import FIRST, Desk

REASON = "no heartbeat for 6 s, and its network does not answer"


@pytest.mark.parametrize(
    ("nodes", "spares", "asked"), [(4, 2, "6"), ("2-4", 0, "2-4"), (4, 0, "4")]
)
def test_slurm_requeues_any_job_that_loses_its_batch_host(nodes, spares, asked):
    lines = sbatch_lines(Path("/runs/a"), Job(nodes=nodes, spares=spares))
    assert {f"#SBATCH --nodes={asked}", "#SBATCH --requeue"} <= set(lines)
    # With it, Slurm would keep the job without its batch script until the time limit.
    assert not any("--no-kill" in line for line in lines)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["job.nodes=2-4", "job.spares=1"], "would be idle"),
        (["job.nodes=2", "job.spares=1", "restarts.in_place=false"], "inside the allocation"),
        (["job.spares=-1"], "spares"),
    ],
)
def test_spares_that_cannot_serve_are_refused(overrides, words):
    with pytest.raises(UserError, match=words):
        resolve([override_layer(overrides)])


def test_this_machine_has_no_spare_nodes():
    with pytest.raises(LaunchError, match=r"job.spares: 1: this machine"):
        choose_executor(Config(job=Job(spares=1, executor="local", cpu=True)))


def test_an_option_of_srun_must_not_choose_the_nodes():
    job = Job(spares=1, executor="slurm", srun_args=["--nodelist=n1"])
    with pytest.raises(LaunchError, match=r"fixes what job.spares=1 leaves to each start"):
        choose_executor(Config(job=job))


def test_the_ranks_of_a_job_with_spares_leave_them_idle(tmp_path):
    desk = Desk(tmp_path, spares=1)
    desk.answer("srun", "exit 3")
    open_attempt(desk.run, FIRST, Budgets(crash=0))
    desk.step()
    (srun,) = desk.called("srun")
    chosen = "--no-kill --nodes=1 --ntasks=1 --ntasks-per-node=1 --nodelist=n1 "
    assert chosen in srun
    assert "--overlap" not in srun


def test_status_and_doctor_name_a_replaced_node(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run = create(tmp_path / "runs" / "a", "command: []\n", {})
    record_event(run, "submitted", attempt=FIRST, executor="slurm")
    record_event(run, "opened", attempt=FIRST)
    record_event(run, "spare-unfit", attempt=FIRST, host="n4", reason="gpus: 1 of 2 is missing")
    second = Attempt(FIRST.job, 0, 1)
    record_event(run, "replaced", attempt=second, lost="n2", by="n3", reason=REASON)
    (tmp_path / "squeue").write_text("#!/bin/sh\necho '7|RUNNING||N/A,N/A|1:00|None|a'\n")
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    told = ["the spare node n4 is unfit: gpus: 1 of 2 is missing"]
    told.append(f"n2 was replaced by n3: {REASON}")
    assert guarded(["status", "a"]) == 0
    assert capsys.readouterr().out.endswith("".join(f"a: {line}\n" for line in told))
    assert guarded(["status", "a", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["replaced"] == told
