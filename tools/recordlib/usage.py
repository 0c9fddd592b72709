"""Jobs with a known use of CPUs and memory, and what sacct says of each attempt and step.

Takes four minutes: shorter attempts than a minute say nothing about use.
"""

from __future__ import annotations

from hpcrun import slurm as programs

from .site import Site

# Holds 64 MiB for SECONDS, and computes for BUSY seconds of CPU time.
WORK = (
    "import sys, time; busy, seconds = map(float, sys.argv[1:]); end = time.time() + seconds\n"
    "taken = bytes([1]) * (64 << 20)\n"
    "while time.process_time() < busy: pass\n"
    "time.sleep(max(0.0, end - time.time()))\n"
)
SHAPE = ("--nodes=2", "--ntasks=2", "--cpus-per-task=2", "--mem=512M", "--gres=gpu:1", "--time=10")
SCENES = ("finished", "requeued", "failed", "cancelled", "array")


def record(site: Site) -> None:
    """Record the jobs once all have ended, with their ids by scene."""
    (site.slurm.shared / "work.py").write_text(WORK)
    site.submit("usage-requeued", *SHAPE, "--requeue", script=script(2, 200))
    site.submit("usage-finished", *SHAPE, script=script(6, 70))
    site.submit("usage-failed", "--mem=128M", script=f"{script(0, 0)}exit 3\n")
    site.submit("usage-cancelled", "--mem=128M", script=script(0, 300))
    element = "#!/bin/bash\nexit $SLURM_ARRAY_TASK_ID\n"
    site.submit("usage-array", "--array=0-1", "--mem=128M", script=element)
    site.wait("usage-cancelled", "RUNNING")
    site.wait("usage-failed", "FAILED")
    site.slurm.run(programs.scancel_command(site.jobs["usage-cancelled"]))
    site.wait("usage-finished", "COMPLETED")
    preempt(site, "usage-requeued")
    jobs = {name: site.jobs.pop(f"usage-{name}") for name in SCENES}
    command = programs.sacct_usage_command(list(jobs.values()))

    def settled() -> bool:
        found = programs.parse_sacct_usage(site.ask(command).stdout)
        live = [one for one in found if one.state in ("RUNNING", "PENDING")]
        # One attempt each, a second one of the requeued job, and a second element of the array.
        return not live and len(found) == len(SCENES) + 2

    site.until(settled, "the end of each job in sacct")
    site.keep("sacct-usage.txt", command)
    site.keep_json("sacct-usage.json", jobs)


def preempt(site: Site, scene: str) -> None:
    """Let an urgent job preempt the scene's job, and cancel its second attempt."""
    urgent = ("--partition=urgent", "--nodes=5", "--exclusive", "--output=/dev/null")
    first = site.slurm.sbatch(*urgent, "--wrap", "sleep 1")
    site.slurm.wait_state(first, "COMPLETED")
    site.wait(scene, "PENDING", "RUNNING")
    # Slurm keeps a requeued job for two minutes.
    site.slurm.admin("scontrol", "update", f"jobid={site.jobs[scene]}", "StartTime=now")
    site.wait(scene, "RUNNING")
    site.slurm.run(programs.scancel_command(site.jobs[scene]))
    site.wait(scene, "CANCELLED")


def script(busy: float, seconds: float) -> str:
    """Return a batch script with one step of all tasks; both ignore SIGTERM, so a preemption kills them."""
    task = f"trap '' TERM; exec /usr/bin/python3 work.py {busy:g} {seconds:g}"
    return f"#!/bin/bash\ntrap '' TERM\nsrun bash -c \"{task}\" &\nwait\nwait\n"
