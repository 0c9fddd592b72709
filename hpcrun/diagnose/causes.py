"""The first cause of a failed attempt, without the failures that follow from it.

When one rank dies the others fail too, within milliseconds, with errors about *that rank* (a closed
connection, an aborted communicator, a watchdog): these are counted, not shown.
"""

import math
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcrun.diagnose.explanations import explained, known_cause
from hpcrun.diagnose.read_log import before_termination, words_at_exit
from hpcrun.run.endings import (
    LOG_ENDS,
    OWN_EXIT,
    READ_FAILURE,
    Exit,
    Failure,
    Hang,
    headline,
    is_cascade,
    last_words,
    node_name,
)
from hpcrun.run.failures.mistakes import is_of_site, is_told, may_pass, never_helps

# Output of srun and slurmstepd at a task's end (srun(1), --kill-on-bad-exit).
_SRUN_TASK = re.compile(
    r"^srun: error: (?P<host>[^:\s]+): tasks? (?P<tasks>[\d,\-]+): (?P<what>.+)$", re.MULTILINE
)
_BY_DESCRIPTION = {signal.strsignal(number): number for number in signal.valid_signals()}
_SRUN_ERROR = re.compile(r"^srun: error: (?P<what>.+)$", re.MULTILINE)
# srun's lines about a node that it lost, or on which it could not start a task.
_LOST_NODE = re.compile(
    r"^srun: error: (?P<what>.*(?:failed on node |Node failure on |Unable to resolve |address for host )"
    r"\"?(?P<host>[^\s:\",]+).*)$",
    re.MULTILINE,
)
# slurmstepd ends a whole step for its memory (JobAcctGatherParams=OverMemoryKill), and srun's lines about the
# tasks come later. Since 25.05 slurmstepd writes the time instead of its node.
_OVER_MEMORY = re.compile(
    r"^(?:slurmstepd-(?P<host>[^:\s]+):|\[[^\]]+\]) error: "
    r"(?P<what>\S+ exceeded memory limit \(\d+ > \d+\), being killed)",
    re.MULTILINE,
)
# srun runs on the node of the batch script. An unreachable controller is not that node's fault.
_UNCONFIRMED = re.compile(
    r"^srun: error: (?P<what>Unable to confirm allocation for job \S+: "
    r"(?!.*(?:contact slurm controller|timed out|Invalid job id)).+)$",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Diagnosis:
    """The first cause in one line, with its rank, host, step and traceback.

    ``cascade`` counts the ranks that failed only because of it. ``hang``: nothing failed, but a
    watchdog ended ranks that made no progress. ``bad_input``: another start would not help.
    ``node_fault``: Slurm could not use the host, whatever the program does. ``follows``: the failure is
    about another rank, but no other failure is known. ``copy``: the failed line in the copy of the code.
    ``unfit``: all nodes that a preflight found unfit. ``crash``: the type of the exception and its place, or
    the signal. ``failure``: the same, if only the program can be the cause. ``passing``: a node, a file
    system, a network or a server may be the cause, so that an equal failure may have another cause.
    """

    line: str
    rank: int | None = None
    host: str | None = None
    step: int | None = None
    traceback: str | None = None
    cascade: int = 0
    hang: bool = False
    bad_input: bool = False
    node_fault: bool = False
    follows: bool = False
    copy: str = ""
    unfit: tuple[str, ...] = ()
    crash: str = ""
    failure: str = ""
    passing: bool = False

    @property
    def waited(self) -> bool:
        """True if there are only timeouts and lost peers: nothing failed by itself."""
        return self.hang or self.follows


# hpcrun's error, with advice; torch's; Python's.
_OUT_OF_MEMORY = ("OutOfMemory", "OutOfMemoryError", "MemoryError")
CERTAIN = ("NotDeterministic", "NotTrainable")
"""hpcrun's error about a task's values or calls (a kernel, for example): no node can change the failure."""

# Messages that point at the machine and not at the program.
_NODE_FAULT = re.compile(
    r"killed by SIG(KILL|BUS)|: Killed|Bus error|CUDA error: (uncorrectable|unspecified launch|hardware"
    r"|all CUDA-capable devices are busy|no CUDA-capable device)|ECC|NVML|Xid"
    r"|No CUDA GPUs are available|unhandled system error|Input/output error|Remote I/O error",
    re.IGNORECASE,
)
_OF_NODES = ("hardware", "storage")


def blames_node(diagnosis: Diagnosis) -> bool:
    """Return True if the first cause points at its node (hardware, memory, driver), not at the program."""
    if diagnosis.host is None or diagnosis.bad_input:
        return False
    known = known_cause(diagnosis.line)
    of_node = known is not None and known.retry == "elsewhere" and known.kind in _OF_NODES
    return diagnosis.node_fault or of_node or bool(_NODE_FAULT.search(diagnosis.line))


def first_cause(
    failures: Sequence[Failure],
    exits: Sequence[Exit],
    batch_log: str = "",
    hang: Hang | None = None,
    logs: Path | None = None,
) -> Diagnosis | None:
    """Return the earliest failure with its own cause; None if there is no trace of any.

    Args:
        failures: the ranks' own records, earliest first.
        exits: the watcher's records, in the order seen.
        batch_log: the output of srun and slurmstepd for this attempt.
        hang: the watchdogs' record, if they ended the attempt.
        logs: the folder with the ranks' logs.
    """
    real = [failure for failure in failures if not is_cascade(failure)]
    killed = [ended for ended in exits if ended.signal is not None and not ended.induced]
    earlier = [failure.time for failure in real] + [ended.time for ended in killed]
    if hang is not None and hang.time < min(earlier, default=math.inf):
        # Ranks that fail after a hang were freed by the end of the ranks that had hung.
        return Diagnosis(hang.line, hang.rank, hang.host, hang.step, None, 0, hang=True)
    if killed and (not real or killed[0].time <= real[0].time):
        return _from_exit(killed[0], failures, logs)
    if real:
        return _from_failure(real[0], failures)
    lost = _lost_node(batch_log)
    if lost:
        return lost
    over = _over_memory(batch_log, failures)
    if over:
        return over
    reported = _first_told(batch_log, {failure.rank for failure in failures})
    if reported:
        return _from_srun(reported, failures, logs)
    if failures:
        return _from_failure(failures[0], failures)
    launch = next((line for line in _SRUN_ERROR.finditer(batch_log) if not _is_task(line)), None)
    # srun returns 0 for tasks that it could not launch.
    return Diagnosis(launch["what"]) if launch else None


def _lost_node(batch_log: str) -> Diagnosis | None:
    found = _LOST_NODE.search(batch_log)
    if found:
        return Diagnosis(found["what"], host=found["host"], node_fault=True)
    found = _UNCONFIRMED.search(batch_log)
    if found:
        return Diagnosis(found["what"], host=node_name(), node_fault=True)
    return None


def _over_memory(batch_log: str, failures: Sequence[Failure]) -> Diagnosis | None:
    """Return slurmstepd's message about a step that it ended for its memory.

    slurmstepd adds up the memory of all tasks on its node, and kills them all: no rank can be named. A line
    without a node refers to the only node that srun mentions.
    """
    found = _OVER_MEMORY.search(batch_log)
    if found is None:
        return None
    hosts = {line["host"] for line in _SRUN_TASK.finditer(batch_log)}
    host = found["host"] or (hosts.pop() if len(hosts) == 1 else None)
    line = f"{host or 'a node'}: out of memory{_because(found['what'])}"
    others = len({failure.rank for failure in failures})
    return Diagnosis(line, None, host, _last_step(failures), None, others)


def _is_task(line: "re.Match[str]") -> bool:
    return _SRUN_TASK.match(line[0]) is not None


def _first_told(batch_log: str, spoken: set[int]) -> "re.Match[str] | None":
    """Return srun's first line about a task without a record: the other ranks' ends follow from that end.

    The order is random if a node's tasks end within one message to srun. Lines after
    srun's own termination of the step are about tasks that srun killed, and are no causes.
    """
    lines = list(_SRUN_TASK.finditer(before_termination(batch_log)))
    silent = (line for line in lines if not _tasks(line["tasks"]) <= spoken)
    return next(silent, lines[0] if lines and not spoken else None)


def _tasks(text: str) -> set[int]:
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


def _from_exit(first: Exit, failures: Sequence[Failure], logs: Path | None) -> Diagnosis:
    others = len({failure.rank for failure in failures} - {first.rank})
    return Diagnosis(
        f"rank {first.rank} on {first.host} was killed by {signal_name(first.signal)}"
        + _because(last_words(logs, first.rank) if logs else None),
        first.rank,
        first.host,
        _last_step(failures),
        None,
        others,
        crash=signal_name(first.signal),
    )


def _from_srun(
    reported: "re.Match[str]", failures: Sequence[Failure], logs: Path | None
) -> Diagnosis:
    """Diagnose srun's line; signals as in strsignal(3): "Killed", "Segmentation fault (core dumped)"."""
    tasks, host, what = reported["tasks"], reported["host"], reported["what"]
    rank = min(_tasks(tasks))
    number = _BY_DESCRIPTION.get(what.removesuffix(" (core dumped)"))
    exited = what.startswith("Exited with exit code")
    words = None
    if logs is not None:
        # A killed rank may have printed a message about an earlier error that it survived.
        words = words_at_exit(logs, rank) if exited else last_words(logs, rank)
    line = f"task {tasks} on {host}: {what}"
    if number is not None and tasks.isdecimal():
        line = f"rank {tasks} on {host} was killed by {signal_name(number)}"
    return Diagnosis(
        line + _because(words),
        rank,
        host,
        _last_step(failures),
        None,
        len(failures),
        bad_input=bool(words) and not _last_step(failures) and _hopeless(words or ""),
        crash="" if number is None else signal_name(number),
        # The other ranks have started.
        node_fault=words is not None and words.startswith("execve(): "),
    )


def _because(words: str | None) -> str:
    return f": {explained(words) or words}" if words else ""


def signal_name(number: int | None) -> str:
    """Return ``SIGKILL`` for 9, and the number itself for a signal without a name."""
    try:
        return signal.Signals(number or 0).name
    except ValueError:
        return f"signal {number}"


def _from_failure(first: Failure, failures: Sequence[Failure]) -> Diagnosis:
    at = f" at {first.where}" if first.where else ""
    kind = "out of memory" if first.kind in _OUT_OF_MEMORY else first.kind
    full = f"{first.kind}: {first.message}"
    traceback = first.traceback
    passes = first.kind == READ_FAILURE or is_cascade(first) or bool(first.passing)
    own = first.kind in CERTAIN or first.certain
    # The last line of a log may be a warning.
    told = is_told(first.message.rpartition(LOG_ENDS)[2])
    reported = explained(first.message, at, traceback)
    if not reported and not own:
        reported = (explained(full, at, traceback) or "").removeprefix(f"{first.kind}: ")
    reported = reported or f"{headline(first.message)}{at}"
    unread, place = first.kind == READ_FAILURE, _kind_and_place(first)
    if unread:
        # The text has the remedy. The catalog knows only the file system's words.
        reported = headline(first.message)
    return Diagnosis(
        f"rank {first.rank} on {first.host}: {reported if own or unread else f'{kind}: {reported}'}",
        first.rank,
        first.host,
        first.step,
        first.traceback,
        len({failure.rank for failure in failures} - {first.rank}),
        # Steps were computed with this input: the cause may be a node.
        bad_input=own
        or first.bad_input
        or (not (first.step or passes or told) and _hopeless(full)),
        copy=first.copy,
        node_fault=unread or first.passing == "node",
        follows=is_cascade(first),
        crash=place,
        failure="" if passes or may_pass(full) else place,
        passing=passes or is_of_site(full),
    )


def _kind_and_place(failure: Failure) -> str:
    """Return what two equal failures of a program have in common: not the rank, and not the numbers.

    It is empty for an exit code alone, which may have different reasons. A program that ends itself after
    the same line has one reason.
    """
    words, ends, line = failure.message.partition(LOG_ENDS)
    # A line of hpcrun's own, such as a warning about the node, is the last one of a silent program.
    if ends and OWN_EXIT in words and not line.startswith("hpcrun: "):
        return f"exit code 1 after {line!r}"
    return f"{failure.kind} at {failure.where}" if failure.where else ""


def _hopeless(message: str) -> bool:
    """Return True if the catalog is certain that no other start would help."""
    return never_helps(message.splitlines())


def _last_step(failures: Sequence[Failure]) -> int | None:
    steps = [failure.step for failure in failures if failure.step is not None]
    return max(steps, default=None)
