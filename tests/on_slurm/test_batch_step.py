"""The batch step at sites with special rules, on a real Slurm."""

from __future__ import annotations

import os
import shutil
import signal

import psutil
import pytest

from hpcrun.run.attempt import Attempt
from tests.support import jobs

from .cluster import PATIENCE, SlurmCluster
from .training import ROOT

pytestmark = pytest.mark.slurm


def test_a_follow_up_job_continues_where_requeues_are_forbidden(bench, calm):
    options = {"job.sbatch_args": ["--no-requeue"]}
    run = bench.submit("forbidden", model__pause=0.05, **options)
    first = bench.job(run)
    with bench.held_at(run, 12):
        bench.hpcrun("preempt", "forbidden")
    bench.wait_until(lambda: bench.job(run) != first, PATIENCE, lambda: bench.story(run))
    second = bench.job(run)
    assert bench.wait_for_end(run) == "COMPLETED", bench.story(run)
    assert bench.slurm.scontrol_show_job(first)["ExitCode"] == "75:0"
    assert bench.causes(run) == ["preemption", "finished"]
    submitted = jobs.events(run, "submitted")[-1]
    assert (submitted.attempt, submitted.continues) == (Attempt(second, 0), first)
    assert jobs.final_state(run) == jobs.final_state(calm)


def test_fewer_tasks_than_ranks_end_as_bad_input(bench):
    # srun takes the number of tasks from the environment.
    lines = ["export SLURM_NTASKS=1 SLURM_NPROCS=1 SLURM_NTASKS_PER_NODE=1"]
    run = bench.submit("fewer", **{"job.nodes": 1, "job.gpus": 2, "job.setup": lines})
    bench.wait_for_end(run)
    assert bench.causes(run) == ["bad-input"], bench.story(run)
    assert "the job has 1 task, the config says 2 ranks" in bench.batch_log(run)


@pytest.mark.slow
def test_a_run_continues_after_its_batch_script_was_killed(bench, calm):
    # By the kernel, for example, when the memory is full. Slurm ends such a job as FAILED.
    run = bench.submit("killed", model__pause=0.2, checkpoint__every=5)
    with bench.held_at(run, 12):
        host = bench.slurm.scontrol_show_job(bench.job(run))["BatchHost"]
        words = {pid: psutil.Process(pid).cmdline() for pid in bench.slurm.processes(host)}
        (script,) = [pid for pid, line in words.items() if " ".join(line).endswith("slurm_script")]
        os.kill(script, signal.SIGKILL)
    assert bench.wait_for_end(run) == "COMPLETED", bench.story(run)
    assert bench.causes(run) == ["node-failure", "finished"]
    assert jobs.final_state(run) == jobs.final_state(calm)


def test_hpcrun_submit_trains_where_sbatch_exports_nothing(bench, slurm: SlurmCluster) -> None:
    # An interpreter that finds the checkout without a variable, like that of an installed package.
    program = bench.folder / "python"
    program.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {slurm.python} "$@"\n')
    program.chmod(0o755)
    options = {"job.sbatch_args": ["--export=NONE"], "job.python": str(program)}
    bench.hpcrun(*bench.arguments("none", "--dry-run", **options))
    arguments = bench.arguments("none", **options)
    # The batch step uses the interpreter of the submission, which the test can only set by its path.
    code = (
        f"import sys; sys.executable = {str(program)!r}; from hpcrun.cli.main import main; main()"
    )
    slurm.run(
        [slurm.python, "-c", code, *arguments],
        cwd=bench.folder,
        env=bench.environ(),
        timeout=PATIENCE,
    )
    run = bench.run("none")
    assert bench.wait_for_end(run) == "COMPLETED", bench.story(run)
    assert bench.causes(run) == ["finished"]


def test_a_requeued_job_starts_no_run_of_another_user(bench) -> None:
    run = bench.submit("replaced", model__pause=0.05)
    job = bench.job(run)
    mark = bench.folder / "mark"
    with bench.held_at(run, 5):
        # As root: what another user can do in a project folder of mode 2770.
        away = run.path.with_name("away")
        run.path.rename(away)
        shutil.copytree(away, run.path, symlinks=True)
        text = run.config.read_text()
        assert "  setup: []\n" in text
        run.config.write_text(text.replace("  setup: []\n", f"  setup: [touch {mark}]\n"))
        for path in (run.path, *run.path.rglob("*")):
            os.chown(path, 65534, -1, follow_symlinks=False)
            if not path.is_symlink():
                path.chmod(0o777)
        bench.slurm.admin("scontrol", "requeue", job)
    bench.slurm.wait_restarts(job, 1)
    bench.slurm.wait_state(job, "FAILED")
    assert bench.slurm.scontrol_show_job(job)["ExitCode"] == "2:0"
    assert not mark.exists()
