"""Steps that use more memory than their job: Slurm ends the step, or the kernel ends a task.

The cluster keeps the settings, so this part runs last. The machine must have cgroups of version 1.
"""

from __future__ import annotations

from .nodes import edit, restart
from .site import Site

NODE = "node1"
# Takes 64 MiB, with 32 MiB in the job's request, and waits until Slurm notices.
GREEDY = 'exec /usr/bin/python3 -c "import time; taken = bytes([1]) * (64 << 20); time.sleep(30)"'


def record(site: Site) -> None:
    """Record the job and its batch log for both."""
    layout = site.slurm.handle.layout
    watched = "JobAcctGatherParams=OverMemoryKill\nJobAcctGatherFrequency=1\n"
    plain = layout.slurm_conf.read_text()
    layout.slurm_conf.write_text(plain + watched)
    restart(site, NODE)
    greedy(site, "over-memory")
    layout.slurm_conf.write_text(plain)
    edit(layout.slurm_conf, "TaskPlugin=", "task/none", "task/cgroup")
    with (layout.slurm_conf.parent / "cgroup.conf").open("a") as settings:
        settings.write("ConstrainRAMSpace=yes\n")
    restart(site, NODE)
    greedy(site, "out-of-memory")


def greedy(site: Site, scene: str) -> None:
    """Record a job of two tasks; task 0 uses too much memory."""
    task = f"[ $SLURM_PROCID = 0 ] || exec sleep 30; {GREEDY}"
    site.submit(
        scene,
        *(f"--nodelist={NODE}", "--ntasks=2", "--mem=32M"),
        script=f"#!/bin/bash\nsrun --kill-on-bad-exit=1 bash -c '{task}'\n",
    )
    site.wait(scene, "FAILED", "OUT_OF_MEMORY", "CANCELLED", "COMPLETED")
    site.keep_job(scene)
    site.keep_log(scene)
    del site.jobs[scene]
