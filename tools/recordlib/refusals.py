"""The output of scontrol, scancel and squeue when they refuse, or without a controller."""

from __future__ import annotations

from collections.abc import Sequence

from hpcrun import slurm as programs

from .site import Site

NOBODY = "99999"


def record(site: Site) -> None:
    """Record the answers as ``refusals.json``: exit code, output and errors of each."""
    facts: dict[str, dict[str, object]] = {}

    def refuse(name: str, command: Sequence[str]) -> None:
        done = site.ask(command)
        facts[name] = {"code": done.returncode, "out": done.stdout, "errors": done.stderr}

    requeue, cancel = programs.scontrol_requeue_command, programs.scancel_command
    nap = ("--output=/dev/null", "--wrap", "sleep 300")
    others = site.slurm.admin("sbatch", "--parsable", "--chdir=/tmp", *nap).strip()
    once = site.slurm.sbatch("--no-requeue", *nap)
    held = site.slurm.sbatch("--hold", *nap)
    elements = site.slurm.sbatch("--hold", "--array=1-2", *nap)
    shell = site.slurm.popen(
        ["salloc", "--quiet", "--kill-command", "--job-name=shell", "sleep", "300"]
    )
    for job in (others, once):
        site.slurm.wait_state(job, "RUNNING")
    named = ["squeue", "--noheader", "--name=shell", "--states=RUNNING", "--format=%i"]
    site.until(lambda: bool(site.ask(named).stdout.strip()), "a shell of salloc")
    inside = site.ask(named).stdout.strip()
    refuse("requeue-denied", requeue(others))
    refuse("requeue-disabled", requeue(once))
    refuse("requeue-batch-only", requeue(inside))
    refuse("requeue-pending", requeue(held))
    refuse("requeue-pending-array", requeue(f"{elements}_1"))
    refuse("requeue-unknown", requeue(NOBODY))
    refuse("cancel-denied", cancel(others))
    refuse("cancel-unknown", cancel(NOBODY))
    refuse("squeue-unknown", programs.squeue_command([NOBODY]))
    refuse("show-unknown", programs.scontrol_show_job_command(NOBODY))
    site.slurm.stop_daemon("slurmctld")
    refuse("requeue-away", requeue(held))
    refuse("squeue-away", programs.squeue_command([held]))
    refuse("show-away", programs.scontrol_show_job_command(held))
    site.slurm.start_daemon("slurmctld")
    site.slurm.admin("scancel", others)
    site.slurm.cancel_all()
    shell.wait()
    site.keep_json("refusals.json", facts)
