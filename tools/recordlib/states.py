"""Jobs in every state before their end, in the output of scontrol show job and squeue."""

from __future__ import annotations

from hpcrun import slurm as programs

from .site import Site

NAP = ("--wrap", "sleep 900")
FAKE = "fake PreemptTime=1 Restarts=9"


def record(site: Site) -> None:
    """Record jobs that run, wait, are suspended, or were requeued; cancel all jobs at the end."""
    site.submit("running", "--nodes=2", "--time=1-02:03", f"--job-name={FAKE}", *NAP)
    # A comment may contain any text.
    site.submit("commented", "--comment=see JobState=FAILED Reason=none", *NAP)
    site.submit("unlimited", "--time=UNLIMITED", *NAP)
    site.submit("suspended", *NAP)
    site.submit("array", "--array=1-3%1", "--time=5", *NAP)
    site.submit("held", "--hold", *NAP)
    site.submit("dependent", f"--dependency=afterok:{site.jobs['held']}", *NAP)
    site.submit("later", "--begin=now+1hour", *NAP)
    site.submit("hetjob", script="#!/bin/bash\n#SBATCH hetjob\n#SBATCH --ntasks=2\nsleep 900\n")
    site.submit("requeued", "--time=5", "--requeue", *NAP)
    site.submit("whole", "--nodes=5", "--exclusive", "--time=3", *NAP)
    started = ("running", "commented", "unlimited", "suspended", "requeued", "hetjob")
    for scene in started:
        site.wait(scene, "RUNNING")
    site.slurm.admin("scontrol", "suspend", site.jobs["suspended"])
    site.wait("suspended", "SUSPENDED")
    site.slurm.run(programs.scontrol_requeue_command(site.jobs["requeued"]))
    site.wait("requeued", "PENDING")
    site.keep_job("requeued")
    site.keep_queue("squeue-live.txt")
    for scene in (*started[:4], "held", "dependent", "later", "hetjob", "whole"):
        site.keep_job(scene)
    site.keep("job-array.txt", programs.scontrol_show_job_command(f"{site.jobs['array']}_1"))
    site.wait_for_text("requeued.txt", "REQUEUE")
    site.keep_log("requeued")
    site.slurm.cancel_all()
