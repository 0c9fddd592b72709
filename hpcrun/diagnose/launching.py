"""Why an attempt ended before rank 0 had a word to say: its set-up, srun's options, a program that is
not there.

Nobody but bash, srun and slurmstepd knows then, and they tell the log of the batch script or of a rank.
"""

import re
from pathlib import Path

from hpcrun.diagnose.causes import Diagnosis
from hpcrun.diagnose.rank_logs import node_without_program
from hpcrun.diagnose.slurm_log import before_termination
from hpcrun.run.endings import node_name
from hpcrun.run.preflight_report import read_unfit

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
_SRUN_TASK = re.compile(r"^srun: error: (?P<host>[^:\s]+): tasks? [\d,\-]+: ", re.MULTILINE)
# The line that cluster/node_setup.py adds to the log of a node.
_NODE_SETUP = re.compile(
    r"^hpcrun: node_setup failed on (?P<node>\S+) with exit code \d+$", re.MULTILINE
)
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


def launch_failure(
    batch_log: str, rank_log: str, *, worked: bool, logs: Path | None = None
) -> Diagnosis | None:
    """What kept the ranks from starting; None where it is nothing that is known here.

    Args:
        batch_log: what srun has said.
        rank_log: what slurmstepd and the interpreter have, in place of a rank.
        worked: as for :func:`setup_failure`.
        logs: the folder with all ranks' logs.
    """
    asked = _ASKED.search(batch_log)
    if asked:
        # A node may be taken out of the allocation while the job is at work.
        lost = worked and asked["what"].lower().startswith("invalid node name")
        return Diagnosis(f"srun: {asked['what']}", None, None, None, None, 0, bad_input=not lost)
    unprepared = _node_setup_failure(logs, worked=worked) if logs else None
    if unprepared is not None:
        return unprepared
    unfit = read_unfit(logs) if logs else None
    if unfit is not None:
        host = unfit.nodes[0] if unfit.nodes else None
        fault = host is not None
        return Diagnosis(
            unfit.cause, None, host, None, None, 0, node_fault=fault, unfit=unfit.nodes
        )
    partly = node_without_program(logs) if logs else None
    if partly is not None:
        host, words = partly
        host = host or _host_of_first_task(batch_log)
        where = host or "some nodes"
        line = f"the ranks on {where} cannot be started: {words} (the other ranks started)"
        return Diagnosis(line, None, host, None, None, 0, node_fault=True)
    absent = _EXECVE.search(batch_log) or _EXECVE.search(rank_log)
    if absent:
        line = f"the ranks cannot be started: {absent['what']} (job.python, job.container)"
        return Diagnosis(line, None, None, None, None, 0, bad_input=not worked)
    lacking = _NO_MODULE.search(rank_log)
    if lacking:
        line = f"no module {lacking['what']} for the ranks' Python (job.python, job.container)"
        return Diagnosis(line, None, None, None, None, 0, bad_input=not worked)
    return None


def _node_setup_failure(logs: Path, *, worked: bool) -> Diagnosis | None:
    """The first node whose ``job.node_setup`` failed, and what bash said about the failing line."""
    for log in sorted(logs.glob("node-setup-*.log")):
        text = log.read_text(errors="replace")
        failed = _NODE_SETUP.search(text)
        if failed:
            words = _words(text[: failed.start()].splitlines())
            line = f"job.node_setup failed on {failed['node']}{words}"
            return Diagnosis(line, None, failed["node"], None, None, 0, bad_input=not worked)
    return None


def _host_of_first_task(batch_log: str) -> str | None:
    found = _SRUN_TASK.search(before_termination(batch_log))
    return found and found["host"]


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
