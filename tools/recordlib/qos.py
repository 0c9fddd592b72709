"""Preemption by quality of service (PreemptType=preempt/qos): three QOS, and a job in its grace time.

The cluster keeps this setting, so this part runs last.
"""

from __future__ import annotations

from hpcrun import slurm as programs

from .endings import DEAF
from .nodes import edit
from .site import Site

# A QOS without a mode follows the mode of the cluster.
MODES = {"requeue": "requeue", "cancel": "cancel", "plain": None}


def record(site: Site) -> None:
    """Record the configuration, the controller's answer for each QOS, and a preempted job."""
    edit(site.slurm.handle.layout.slurm_conf, "PreemptType=", "partition_prio", "qos")
    site.slurm.stop_daemon("slurmctld")
    site.slurm.start_daemon("slurmctld")
    for name, mode in MODES.items():
        entry(site, "add", "qos", name, "gracetime=8", *([f"preemptmode={mode}"] if mode else []))
    entry(site, "add", "qos", "high", f"preempt={','.join(MODES)}", "priority=100")
    names = ",".join(["normal", "high", *MODES])
    entry(site, "modify", "user", site.slurm.user, "set", f"qos={names}")
    site.keep("show-config-qos.txt", ["scontrol", "show", "config"])
    for name in MODES:
        # The controller gets a QOS from slurmdbd a moment later.
        site.until(lambda name=name: f"QOS={name}(" in site.ask(shown(name)).stdout, name)  # type: ignore[misc]
        site.keep(f"qos-{name}.txt", shown(name))
    site.keep("qos-unknown.txt", shown("unknown"))
    preempted(site)


def preempted(site: Site) -> None:
    """Record a job in the grace time of its QOS, and its log after the requeue."""
    scene = "preempted-by-qos"
    job = site.submit(scene, "--nodes=5", "--exclusive", "--time=10", "--qos=requeue", script=DEAF)
    site.wait_for_text(f"{scene}.txt", "up")
    urgent = ("--qos=high", "--nodes=5", "--exclusive", "--output=/dev/null")
    first = site.slurm.sbatch(*urgent, "--wrap", "sleep 1")
    command = programs.scontrol_show_job_command(job)
    site.until(lambda: "PreemptTime=None" not in site.ask(command).stdout, "a preemption by QOS")
    site.keep("job-qos-grace.txt", command)
    site.slurm.wait_state(first, "COMPLETED")
    site.wait_for_text(f"{scene}.txt", "PREEMPTION")
    site.keep_log(scene)
    site.wait(scene, "PENDING", "RUNNING")
    site.slurm.cancel_all()
    del site.jobs[scene]


def entry(site: Site, *words: str) -> None:
    """Change the accounting database."""
    site.slurm.admin("sacctmgr", "--immediate", *words)


def shown(name: str) -> list[str]:
    """Return hpcrun's command for one QOS."""
    return ["scontrol", "show", "assoc_mgr", "flags=qos", f"qos={name}"]
