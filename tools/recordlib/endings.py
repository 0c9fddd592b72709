"""Jobs that end in every way except by memory: batch logs, states, and sacct."""

from __future__ import annotations

from hpcrun import slurm as programs

from .site import Site

# Script and task ignore SIGTERM, like a rank that saves.
DEAF = (
    "#!/bin/bash\ntrap '' TERM\nsrun bash -c \"trap '' TERM; echo up; sleep 300\" &\nwait\nwait\n"
)
NAP = "#!/bin/bash\nsrun bash -c 'echo up; sleep 300'\n"


def record(site: Site) -> None:
    """Record the ends; waits a minute for the time limit."""
    site.submit("time-limit", "--time=1", script=NAP)
    plain(site)
    cancelled(site)
    signalled(site)
    node_failure(site)
    site.wait("time-limit", "TIMEOUT")
    site.keep_log("time-limit")
    site.keep_job("time-limit")
    preempted(site)
    site.keep_queue("squeue-ended.txt")
    accounted(site)


def plain(site: Site) -> None:
    """Record ends that the program itself causes."""
    site.submit("completed", "--wrap", "true")
    site.submit("failed", "--wrap", "exit 3")
    site.submit(
        "rank-killed",
        *("--nodes=2", "--ntasks=2"),
        script="#!/bin/bash\nsrun --kill-on-bad-exit=1 bash -c "
        "'[ $SLURM_PROCID != 1 ] || kill -KILL $$; sleep 300'\n",
    )
    for scene, state in (("completed", "COMPLETED"), ("failed", "FAILED")):
        site.wait(scene, state)
        site.keep_job(scene)
    site.wait("rank-killed", "FAILED")
    site.keep_log("rank-killed")


def cancelled(site: Site) -> None:
    """Record a canceled job while it is COMPLETING, and later."""
    job = site.submit("cancelled", script=DEAF)
    site.wait_for_text("cancelled.txt", "up")
    site.slurm.run(programs.scancel_command(job))
    site.wait("cancelled", "COMPLETING")
    site.keep("job-cancelling.txt", programs.scontrol_show_job_command(job))
    told = site.ask([*programs.scontrol_show_job_command(job), "--json"])
    # scontrol of 22.05 has no such option.
    if told.returncode == 0:
        site.write("job-cancelling.json", told.stdout)
    site.wait("cancelled", "CANCELLED")
    site.keep_job("cancelled")
    site.keep_log("cancelled")


def signalled(site: Site) -> None:
    """Record a SIGTERM to the steps without a cancellation."""
    job = site.submit("signalled", script=NAP)
    site.wait_for_text("signalled.txt", "up")
    site.slurm.run(programs.scancel_command(job, "TERM"))
    site.wait("signalled", "FAILED", "CANCELLED", "COMPLETED")
    site.keep_log("signalled")


def node_failure(site: Site) -> None:
    """Record the failure of a node that does not run the batch script."""
    job = site.submit("node-failure", "--nodes=2", "--ntasks=2", "--exclusive", script=NAP)
    site.wait_for_text("node-failure.txt", "up\nup")
    hosts = programs.parse_squeue(site.ask(programs.squeue_command([job])).stdout)[job].nodes
    site.slurm.kill_node(hosts[-1])
    site.wait_for_text("node-failure.txt", "NODE FAILURE")
    site.wait("node-failure", "PENDING", "RUNNING")
    site.slurm.run(programs.scancel_command(job))
    site.keep_log("node-failure")
    site.slurm.revive_node(hosts[-1])


def preempted(site: Site) -> None:
    """Record a preemption: before, in the grace time, and after the kill."""
    shape = ("--nodes=5", "--exclusive", "--time=10")
    job = site.submit("preempted", *shape, script=DEAF)
    site.wait_for_text("preempted.txt", "up")
    site.keep("squeue-before-grace.txt", programs.squeue_command([job]))
    urgent = ("--partition=urgent", "--nodes=5", "--exclusive", "--output=/dev/null")
    first = site.slurm.sbatch(*urgent, "--wrap", "sleep 1")
    shown = programs.scontrol_show_job_command(job)
    site.until(lambda: "PreemptTime=None" not in site.ask(shown).stdout, "a preemption")
    site.keep("job-grace.txt", shown)
    site.keep("squeue-grace.txt", programs.squeue_command([job]))
    site.slurm.wait_state(first, "COMPLETED")
    site.wait_for_text("preempted.txt", "PREEMPTION")
    site.keep_log("preempted")
    site.wait("preempted", "PENDING", "RUNNING")
    site.slurm.cancel_all()


def accounted(site: Site) -> None:
    """Record every attempt of every job, once the database has the last attempt."""
    command = programs.sacct_command(list(site.jobs.values()))

    def settled() -> bool:
        records = programs.parse_sacct(site.ask(command).stdout)
        seen = {record.job_id.split("_")[0].split("+")[0] for record in records}
        live = [x for x in records if x.state in ("RUNNING", "PENDING", "SUSPENDED")]
        return not live and seen >= set(site.jobs.values())

    site.until(settled, "the end of each job in sacct")
    site.keep("sacct-all.txt", command)
