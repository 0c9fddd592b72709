"""The cause of an end before rank 0 could record anything: set-up, srun's options, or a missing program.

Then only bash, srun and slurmstepd know the cause, and write it to the log of the batch script or of a rank.
"""

import re
from pathlib import Path

from hpcrun.diagnose.causes import Diagnosis
from hpcrun.diagnose.read_log import before_termination, node_without_program
from hpcrun.run.endings import node_name
from hpcrun.run.failures.catalog import match
from hpcrun.run.reports import read_unfit

# "/var/spool/slurmd/job00012/slurm_script: line 17: module: command not found"
_BASH = re.compile(r"^\S.*?: line \d+: (?P<what>.+)$")
_TROUBLE = re.compile(
    r"\berror\b|not found|no such|cannot|unable|denied|unknown|invalid|failed", re.IGNORECASE
)
_SRUN = re.compile(r"^srun: (?P<how>error: |fatal: |)(?P<what>.+)$", re.MULTILINE)
# srun's words about the job's own request, which is the same on every node. A message without "error" or
# "fatal" may be a warning, or come from the site's plugins.
_PLAINLY_ASKED = re.compile(
    r"(?:unrecognized|ambiguous|invalid|must specify) .+|option .+ an argument", re.IGNORECASE
)
_ASKED = re.compile(
    r"unrecognized|ambiguous|\binvalid\b|illegal|must (?:specify|be)|mutually exclusive|exceeds|requires"
    r"|conflict|can(?:not| ?not|'t) be (?:used|combined)|can only be"
    r"|not (?:supported|permitted|allowed|valid)"
    r"|option .+ an argument|more processors requested|memory required by task",
    re.IGNORECASE,
)
# srun's words about the controller, the network or a node.
_PASSES = re.compile(
    r"contact|connect|timed out|timeout|credential|munge|authenticat|protocol|version|slurmctld|controller"
    r"|configuration (?:source|file)|node (?:fail|name)|not ready|\bbusy|drain|zero bytes|expired"
    r"|invalid job id|already complet|no space|malloc|cannot allocate|\bfork\b|pthread|resolve|address"
    r"|temporar|try again"
    r"|unexpected message|slurm\.conf",
    re.IGNORECASE,
)
# srun's words about what the nodes have. Once the ranks have run, a node has lost a GPU, or has left.
_OF_NODES = re.compile(
    r"invalid node name|node configuration is not available|more processors requested"
    r"|memory required by task|generic resource|\bgres\b|trackable resource|node count",
    re.IGNORECASE,
)
_ALLOC = re.compile(r"unable to (?:create step|allocate)[^:]*:? ?", re.IGNORECASE)
# The shell of the batch step, with srun's path or its name.
_NO_SRUN = re.compile(
    r"^hpcrun: line \d+: \S*\bsrun: (?P<why>command not found|No such file or directory|Permission denied)",
    re.MULTILINE,
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
    asked = srun_refusal(batch_log)
    if asked is not None:
        lost = worked and bool(_OF_NODES.search(asked))
        return Diagnosis(f"srun: {asked}", bad_input=not lost)
    absent = _NO_SRUN.search(batch_log)
    if absent:
        line = (
            f"srun: {absent['why']}: the PATH of the batch script lacks Slurm's programs; add their folder "
            "in the profile that batch scripts read, or remove --export from job.sbatch_args"
        )
        return Diagnosis(line, host=node_name(), bad_input=not worked)
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


def srun_refusal(batch_log: str) -> str | None:
    """Return srun's message about a request that it refuses at every start; None without such a message.

    Args:
        batch_log: the output of srun for an attempt without a rank.
    """
    for line in _SRUN.finditer(batch_log):
        how, what = line["how"], line["what"]
        entry = match(line[0])
        if entry is not None and entry.retry in ("helps", "elsewhere"):
            continue
        if entry is not None and entry.retry == "never" and entry.role == "initiating":
            return what
        if not how:
            if _PLAINLY_ASKED.match(what):
                return what
            continue
        if "invalid node name" not in what.lower() and _PASSES.search(_ALLOC.sub("", what)):
            continue
        # srun ends itself with "fatal" while it reads its options.
        if how == "fatal: " or _ASKED.search(what):
            return what
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
