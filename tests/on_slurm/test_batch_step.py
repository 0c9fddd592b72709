"""The batch step at sites with special rules, on a real Slurm."""

from __future__ import annotations

import pytest

from hpcrun.run.events import Attempt
from tests import jobs

from .cluster import PATIENCE, SlurmCluster
from .scripts import SBATCH
from .scripts import Bench as RawBench
from .test_submission import processes
from .training import ROOT, Bench

pytestmark = pytest.mark.slurm


def forbid_requeue(bench: Bench, job: str) -> None:
    """Make the controller refuse to requeue a job that was submitted with --requeue, as a site may."""
    bench.slurm.admin("scontrol", "update", f"jobid={job}", "requeue=0")
    asked = bench.slurm.run(["scontrol", "requeue", job], check=False)
    assert asked.returncode != 0
    assert bench.slurm.state(job) == "RUNNING"


@pytest.mark.parametrize(
    "options", [["--no-requeue"], pytest.param([], id="by-the-controller", marks=pytest.mark.slow)]
)
def test_a_follow_up_job_continues_where_requeues_are_forbidden(bench, calm, options):
    run = bench.submit("forbidden", model__pause=0.05, **{"job.sbatch_args": options})
    first = bench.job(run)
    with bench.held_at(run, 12):
        if not options:
            forbid_requeue(bench, first)
        bench.hpcrun("preempt", "forbidden")
    bench.wait_until(lambda: bench.job(run) != first, PATIENCE, lambda: bench.story(run))
    second = bench.job(run)
    assert bench.wait_for_end(run) == "COMPLETED", bench.story(run)
    assert bench.slurm.scontrol_show_job(first)["ExitCode"] == "75:0"
    assert bench.causes(run) == ["preemption", "finished"]
    submitted = jobs.events(run, "submitted")[-1]
    assert (submitted.attempt, submitted.fields["continues"]) == (Attempt(second, 0), first)
    assert jobs.final_state(run) == jobs.final_state(calm)


@pytest.mark.slow
def test_a_requeue_without_an_answer_happens_once(bench, calm):
    """The controller takes the request, and answers after the timeout of scontrol (MessageTimeout)."""
    asking, stopped, late = (bench.folder / name for name in ("asking", "stopped", "late"))
    late.mkdir()
    (late / "scontrol").write_text(
        f'#!/bin/bash\nif [ "$1" = requeue ]; then echo >> {asking}; '
        f"until [ -e {stopped} ]; do sleep 0.1; done; fi\n"
        f'PATH={bench.slurm.path} exec scontrol "$@"\n'
    )
    (late / "scontrol").chmod(0o755)
    path = {"PATH": f"{late}:{bench.slurm.path}"}
    bench.hpcrun(*bench.arguments("unheard", model__pause=0.05), env=path)
    run = bench.run("unheard")
    with bench.held_at(run, 12):
        bench.hpcrun("preempt", "unheard")
    bench.wait_until(asking.exists, PATIENCE, lambda: bench.story(run))
    (controller,) = processes(bench.slurm, "ctl", "slurmctld")
    controller.suspend()
    try:
        stopped.touch()
        bench.wait_until(
            lambda: bool(jobs.events(run, "requeue-failed")),
            *(PATIENCE, lambda: bench.batch_log(run)),
        )
    finally:
        controller.resume()
    assert bench.wait_for_end(run) == "COMPLETED", bench.story(run)
    assert bench.causes(run) == ["preemption", "finished"]
    assert bench.slurm.restarts(bench.job(run)) == 1
    assert len(asking.read_text().splitlines()) == 1
    assert jobs.final_state(run) == jobs.final_state(calm)


@pytest.mark.slow
def test_a_site_on_which_sbatch_exports_nothing_trains(slurm: SlurmCluster) -> None:
    """The user's set-up lines set the variables, as such sites require."""
    bench = RawBench(slurm)
    run = bench.prepare("nothing-exported")
    lines = "\n".join(f"export {name}='{value}'" for name, value in bench.environment().items())
    text = (SBATCH / "train.sbatch").read_text().replace("# srun --export=…,", f"{lines}\n#")
    script = bench.write("mine.sbatch", text)
    job = bench.sbatch(
        *("--export=NONE", "--nodes=2", "--ntasks-per-node=2", str(script), "runs/nothing-exported")
    )
    bench.wait_for_end(job)
    assert jobs.result(run)["state"] == "finished", bench.told(run)


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


def test_a_raw_script_inside_a_job_with_gpus_trains(slurm: SlurmCluster) -> None:
    bench = RawBench(slurm)
    run = bench.prepare("inner", job__nodes=1)
    inner = bench.folder / "inner-job"
    command = f"sbatch --parsable -n2 {SBATCH / 'train.sbatch'} runs/inner > {inner}"
    outer = bench.sbatch(
        *("-N1", "--gpus-per-node=2", "--gpus-per-task=1", "-n2", "-c2", "--hint=nomultithread"),
        *("--output=/dev/null", "--wrap", command),
    )
    bench.wait_for_end(outer)
    bench.wait_for_end(inner.read_text().strip())
    assert [event.cause for event in jobs.events(run, "ended")] == ["finished"], bench.told(run)
