"""The cause of an end before rank 0 could record anything: set-up, srun's options, or a missing program.

Then only bash, srun and slurmstepd know the cause, and write it to the log of the batch script or of a rank.
"""

import re
from pathlib import Path

from hpcrun.diagnose.causes import Diagnosis
from hpcrun.diagnose.read_log import before_termination, node_without_program
from hpcrun.run.endings import node_name
from hpcrun.run.reports import read_unfit

# "/var/spool/slurmd/job00012/slurm_script: line 17: module: command not found"
_BASH = re.compile(r"^\S.*?: line \d+: (?P<what>.+)$")
_TROUBLE = re.compile(
    r"\berror\b|not found|no such|cannot|unable|denied|unknown|invalid|failed", re.IGNORECASE
)
# srun's messages about the job's own request, which is the same on every node.
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
# The last line of a log; `python -m hpcrun.worker` puts the message in parentheses.
_NO_MODULE = re.compile(r"No module named '?(?P<what>[\w.]+)'?\)?\s*\Z")
_OLD_PYTHON = re.compile(r"hpcrun needs Python [\d.]+ or newer[^\n]*?\)")


def setup_failure(command: str, batch_log: str, *, worked: bool) -> Diagnosis:
    """Return the diagnosis of a batch script that ended at ``command``, before it started its ranks.

    Args:
        batch_log: the output of this attempt, including the rest of its first line.
        worked: an earlier start came further, so the cause is this node or temporary.
    """
    first = (command.strip().splitlines() or [""])[0][:100]
    line = f"setup failed at `{first}`{_words(batch_log.splitlines()[1:])}"
    return Diagnosis(line, host=node_name(), bad_input=not worked)


def launch_failure(
    batch_log: str, rank_log: str, *, worked: bool, logs: Path | None = None
) -> Diagnosis | None:
    """Return the cause that kept the ranks from starting; None if it is unknown.

    Args:
        batch_log: the output of srun.
        rank_log: the output of slurmstepd and the interpreter instead of a rank.
        worked: as for :func:`setup_failure`.
        logs: the folder with all ranks' logs.
    """
    asked = _ASKED.search(batch_log)
    if asked:
        # A node may be removed from the allocation while the job runs.
        lost = worked and asked["what"].lower().startswith("invalid node name")
        return Diagnosis(f"srun: {asked['what']}", bad_input=not lost)
    unprepared = _node_setup_failure(logs, worked=worked) if logs else None
    if unprepared is not None:
        return unprepared
    unfit = read_unfit(logs) if logs else None
    if unfit is not None:
        host = unfit.nodes[0] if unfit.nodes else None
        fault = host is not None
        return Diagnosis(unfit.cause, host=host, node_fault=fault, unfit=unfit.nodes)
    partly = node_without_program(logs) if logs else None
    if partly is not None:
        host, words = partly
        host = host or _host_of_first_task(batch_log)
        where = host or "some nodes"
        line = f"the ranks on {where} cannot be started: {words} (the other ranks started)"
        return Diagnosis(line, host=host, node_fault=True)
    absent = _EXECVE.search(batch_log) or _EXECVE.search(rank_log)
    if absent:
        line = (
            f"the ranks cannot be started: {absent['what']} (job.python, job.image, job.container)"
        )
        return Diagnosis(line, bad_input=not worked)
    old = _OLD_PYTHON.search(rank_log)
    if old:
        line = f"{old[0]} (job.python, job.image, job.container)"
        return Diagnosis(line, bad_input=True)
    lacking = _NO_MODULE.search(rank_log)
    if lacking:
        line = f"no module {lacking['what']} for the ranks' Python (job.python, job.image, job.container)"
        return Diagnosis(line, bad_input=not worked)
    return None


def _node_setup_failure(logs: Path, *, worked: bool) -> Diagnosis | None:
    """Return the first node on which ``job.node_setup`` failed, with bash's message about the failed line."""
    for log in sorted(logs.glob("node-setup-*.log")):
        text = log.read_text(errors="replace")
        failed = _NODE_SETUP.search(text)
        if failed:
            words = _words(text[: failed.start()].splitlines())
            line = f"job.node_setup failed on {failed['node']}{words}"
            return Diagnosis(line, host=failed["node"], bad_input=not worked)
    return None


def _host_of_first_task(batch_log: str) -> str | None:
    found = _SRUN_TASK.search(before_termination(batch_log))
    return found and found["host"]


def _words(lines: list[str]) -> str:
    """Return words from the log: bash's own line, the first line with an error, or the last line."""
    reported = [line.strip() for line in lines if line.strip()]
    for line in reversed(reported):
        found = _BASH.match(line)
        if found:
            return f": {found['what'][:300]}"
    trouble = next((line for line in reported if _TROUBLE.search(line)), None)
    if trouble is not None:
        return f": {trouble[:300]}"
    return f"; its log ends with: {reported[-1][:300]}" if reported else ""
