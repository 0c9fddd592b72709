"""What Slurm is told when a run can neither save nor be requeued: codes of their own, and nothing blind."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import jobs

from . import cluster
from .training import Bench

pytestmark = pytest.mark.slurm


def test_a_stop_that_cannot_save_ends_with_74_is_not_requeued_and_goes_on_when_mended(bench, calm):
    run = bench.submit("full", model__pause=0.05, checkpoint__every=5)
    with bench.held_at(run, 12):
        job = bench.job(run)
        # As a disk that has filled up meanwhile: nothing new can be made beside the checkpoints there are.
        run.checkpoints.chmod(0o500)
        bench.hpcrun("preempt", "full")
    try:
        assert bench.wait_for_end(run) == "FAILED", bench.story(run)
    finally:
        run.checkpoints.chmod(0o700)
    assert bench.slurm.scontrol_show_job(job)["ExitCode"] == "74:0"
    assert (bench.slurm.restarts(job), bench.causes(run)) == (0, ["save-failed"])
    result = bench.result(run)
    assert (result["state"], result["cause"]) == ("failed", "save-failed")
    assert "Permission denied" in result["reason"]
    (stopped,) = jobs.events(run, "stopped")
    assert not stopped.fields["committed"]
    bench.hpcrun("resume", "full")
    assert bench.wait_for_end(run) == "COMPLETED", bench.story(run)
    saved = [event.step for event in jobs.events(run, "saved")]
    assert jobs.events(run, "started")[1].step in saved
    assert jobs.final_state(run) == jobs.final_state(calm)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("job.setup", ["module load CUDA/12"],
         "setup failed at `module load CUDA/12`: module: command not found"),
        ("job.srun_args", ["--nix"], "srun: unrecognized option '--nix'"),
        ("job.container", ["apptainer", "exec"],
         "cannot be started: apptainer: No such file or directory"),
    ],
)  # fmt: skip
def test_what_fails_before_the_ranks_start_ends_a_new_run_with_its_words(bench, key, value, words):
    run = bench.submit("first-day", **{key: value})
    assert bench.wait_for_end(run) == "FAILED", bench.story(run)
    job = bench.job(run)
    assert bench.slurm.scontrol_show_job(job)["ExitCode"] == "2:0"
    assert (bench.slurm.restarts(job), bench.causes(run)) == (0, ["bad-input"])
    assert words in bench.result(run)["reason"]
    assert words in bench.hpcrun("status", "first-day").stdout


# Slurm's own word for a job script's exit code that asks for another start (slurm.conf, RequeueExit).
SITES = {"plain": (), "requeue-exit": (("RequeueExit", "75"),)}


@pytest.fixture(params=SITES)
def site(request, slurm) -> Iterator[cluster.SlurmCluster]:
    """A cluster of two nodes of such a site."""
    name = f"pytest-{os.getpid()}-{request.param}"[:31]
    try:
        yield cluster.start(name, nodes=2, settings=SITES[request.param])
    finally:
        cluster.stop(name)


def batch_scripts(site: cluster.SlurmCluster) -> list[int]:
    """The processes of batch scripts on the nodes."""
    found = []
    for pid in (pid for node in site.nodes for pid in site.processes(node)):
        with contextlib.suppress(OSError):
            if b"slurm_script" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


# The program and the batch script ask for three minutes before they give up.
@pytest.mark.slow
def test_a_requeue_that_no_controller_takes_ends_with_75(site, calm):
    bench = Bench(site)
    run = bench.submit("alone", model__pause=0.03)
    with bench.held_at(run, 14):
        job = bench.job(run)
        (victim,) = bench.pids(run, 1)
        assert batch_scripts(site)
        site.stop_daemon("slurmctld")
        os.kill(victim, signal.SIGKILL)
    site.wait_until(lambda: not batch_scripts(site), 900, lambda: bench.story(run))
    site.start_daemon("slurmctld")
    if dict(site.handle.spec.settings).get("RequeueExit") is None:
        assert site.wait_state(job) == "FAILED", bench.story(run)
        assert site.scontrol_show_job(job)["ExitCode"] == "75:0"
        assert "`hpcrun resume` continues it" in bench.hpcrun("status", "alone").stdout
        bench.hpcrun("resume", "alone")
    ends = ["crash", "finished"]
    bench.wait_until(lambda: bench.causes(run) == ends, 300, lambda: bench.story(run))
    assert jobs.final_state(run) == jobs.final_state(calm)
