"""The requeue of a preempted job that has ended within its grace time.

Since Slurm 24.05 the controller requeues such a job by itself where its PreemptMode is REQUEUE, whatever its
exit code. ``scontrol requeue`` does not cancel this automatic requeue: a job that also requeues itself starts
once more after its next end, although it has finished. For older versions such an end is a failure.
"""

import re

from hpcrun import slurm

_SINCE = (24, 5)
_SETTING = re.compile(r"^(SLURM_VERSION|PreemptMode|PreemptType)\s*=\s*(\S+)", re.MULTILINE)
_MODE = re.compile(r"\bPreemptMode=(\S+)")


def slurm_requeues(job: str) -> bool:
    """Return True if Slurm itself starts ``job``, which runs in its grace time, again after its end.

    False if unknown: a job that starts once too often finds its run finished and ends immediately, while a
    job without a restart would lose its run.
    """
    config = slurm.run(["scontrol", "show", "config"]).stdout
    if not requeues_in_grace_time(config):
        return False
    fields = slurm.parse_show_job(slurm.run(slurm.scontrol_show_job_command(job)).stdout)
    if fields.get("Requeue") != "1":
        return False
    return preempt_mode(config, _description(config, fields)) == "REQUEUE"


def requeues_in_grace_time(config: str) -> bool:
    """Return True if this version of Slurm requeues such jobs, from ``scontrol show config``."""
    version = re.match(r"(\d+)\.(\d+)", _settings(config).get("SLURM_VERSION", ""))
    return version is not None and (int(version[1]), int(version[2])) >= _SINCE


def preempt_mode(config: str, description: str) -> str | None:
    """Return the mode in which a job is preempted: REQUEUE, CANCEL, SUSPEND or OFF; None if unknown.

    Args:
        config: what ``scontrol show config`` prints.
        description: what ``scontrol`` prints about the job's partition or QOS.
    """
    default = _settings(config).get("PreemptMode", "")
    found = _MODE.search(description)
    if found is None:
        return None
    mode = found[1].upper()
    # The QOS has no mode, so the mode of the cluster applies.
    if _by_qos(config) and mode == "OFF":
        mode = default.upper()
    return next((word for word in mode.split(",") if word != "GANG"), None)


def _description(config: str, job: dict[str, str]) -> str:
    if _by_qos(config):
        qos = job.get("QOS", "")
        return slurm.run(["scontrol", "show", "assoc_mgr", "flags=qos", f"qos={qos}"]).stdout
    return slurm.run(["scontrol", "show", "partition", job.get("Partition", "")]).stdout


def _by_qos(config: str) -> bool:
    return _settings(config).get("PreemptType", "") == "preempt/qos"


def _settings(config: str) -> dict[str, str]:
    return {found[1]: found[2] for found in _SETTING.finditer(config)}
