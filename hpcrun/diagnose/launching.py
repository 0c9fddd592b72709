"""Why an attempt ended before rank 0 had a word to say: its set-up, srun's options, a program that is
not there.

Nobody but bash, srun and slurmstepd knows then, and they tell the log of the batch script or of a rank.
"""

import re

from hpcrun.diagnose.causes import Diagnosis
from hpcrun.run.endings import node_name

# "/var/spool/slurmd/job00012/slurm_script: line 17: module: command not found"
_BASH = re.compile(r"^\S.*?: line \d+: (?P<what>.+)$")
_TROUBLE = re.compile(
    r"\berror\b|not found|no such|cannot|unable|denied|unknown|invalid|failed", re.IGNORECASE
)
# Of what the job asks of srun, which is the same on every node.
_ASKED = re.compile(
    r"^srun: (?:error: |fatal: )?(?P<what>(?:unrecognized|ambiguous|invalid|must specify) .+"
    r"|option .+ an argument.*"
    r"|Unable to create step for job \S+ (?:More processors requested than permitted"
    r"|Memory required by task is not available|Invalid generic resource.*))$",
    re.MULTILINE | re.IGNORECASE,
)
_EXECVE = re.compile(r"error: execve\(\): (?P<what>.+)$", re.MULTILINE)
_NO_MODULE = re.compile(r"No module named '?(?P<what>[\w.]+)'?\s*\Z")


def setup_failure(command: str, batch_log: str, *, worked: bool) -> Diagnosis:
    """The end of a batch script at ``command``, before it started its ranks.

    Args:
        batch_log: what this attempt has written, the rest of its first line included.
        worked: the job has come further before, so that it is this node's trouble, or of the moment.
    """
    first = (command.strip().splitlines() or [""])[0][:100]
    line = f"setup failed at `{first}`{_words(batch_log.splitlines()[1:])}"
    return Diagnosis(line, None, node_name(), None, None, 0, bad_input=not worked)


def launch_failure(batch_log: str, rank_log: str, *, worked: bool) -> Diagnosis | None:
    """What kept the ranks from starting; None where it is nothing that is known here.

    Args:
        batch_log: what srun has said.
        rank_log: what slurmstepd and the interpreter have, in place of a rank.
        worked: as for :func:`setup_failure`.
    """
    asked = _ASKED.search(batch_log)
    if asked:
        # A node may be taken out of the allocation while the job is at work.
        lost = worked and asked["what"].lower().startswith("invalid node name")
        return Diagnosis(f"srun: {asked['what']}", None, None, None, None, 0, bad_input=not lost)
    absent = _EXECVE.search(batch_log) or _EXECVE.search(rank_log)
    if absent:
        line = f"the ranks cannot be started: {absent['what']} (job.python, job.container)"
        return Diagnosis(line, None, None, None, None, 0, bad_input=not worked)
    lacking = _NO_MODULE.search(rank_log)
    if lacking:
        line = f"no module {lacking['what']} for the ranks' Python (job.python, job.container)"
        return Diagnosis(line, None, None, None, None, 0, bad_input=not worked)
    return None


def _words(lines: list[str]) -> str:
    """What to add of the log: bash's own line, the first that sounds like trouble, or the last."""
    told = [line.strip() for line in lines if line.strip()]
    for line in reversed(told):
        found = _BASH.match(line)
        if found:
            return f": {found['what'][:300]}"
    trouble = next((line for line in told if _TROUBLE.search(line)), None)
    if trouble is not None:
        return f": {trouble[:300]}"
    return f", whose log ends with: {told[-1][:300]}" if told else ""
