"""Slurm's lines in the log of a batch script: the reason for the job's end, and the time of the step's end.

Recorded with Slurm 22.05, 24.11 and 26.05. Since 25.05 slurmstepd names the signal of a cancellation
("DUE to SIGNAL Terminated"), and its lines may lack the prefix ``slurmstepd-HOST:``.
"""

import re

from hpcrun.slurm import unix_time

_ENDED = re.compile(
    r"\*\*\* (?P<what>JOB|STEP) (?P<id>\S+) ON (?P<host>\S+) CANCELLED AT (?P<at>[^\s,*]+)"
    r"(?: DUE (?:TO|to) (?P<why>[^*,]+?))?(?=,| \*\*\*)"
)
_REASONS = {
    "PREEMPTION": "preemption",
    "TIME LIMIT": "time-limit",
    "NODE FAILURE": "node-failure",
    # By an administrator or another program: hpcrun requeues only after it has classified the end.
    "JOB REQUEUE": "preemption",
}
# After this line Slurm itself kills tasks; their ends are not causes.
_TERMINATION = re.compile(
    r"Terminating StepId=|_step_signal: Terminating|Job step aborted|Force Terminated"
    r"|\*\*\* (?:JOB|STEP) \S+ ON \S+ CANCELLED AT "
)


def scheduler_word(batch_log: str) -> str | None:
    """Return Slurm's reason for the end (preemption, time-limit, node-failure, cancelled), or None.

    A step without a reason, or with a signal, was not ended by the scheduler: srun ends a step when a
    task fails.
    """
    for ended in _ENDED.finditer(batch_log):
        why = ended["why"]
        if why in _REASONS:
            return _REASONS[why]
        if ended["what"] == "JOB" and (why is None or why.startswith("SIGNAL ")):
            return "cancelled"
    return None


def before_termination(batch_log: str) -> str:
    """Return the lines that Slurm wrote before it began to kill tasks."""
    found = _TERMINATION.search(batch_log)
    if found is None:
        return batch_log
    return batch_log[: batch_log.rfind("\n", 0, found.start()) + 1]


def since(batch_log: str, start: float) -> str:
    """Return the part of a log without marks that follows the last end before ``start`` (Unix seconds).

    Each attempt but the newest ended with such a line, at the latest when it was requeued.
    """
    cut = 0
    for ended in _ENDED.finditer(batch_log):
        when = unix_time(ended["at"])
        if when is not None and when < start:
            cut = ended.end()
    return batch_log[cut:]
