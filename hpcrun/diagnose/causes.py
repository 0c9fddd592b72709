"""The first cause of a failed attempt, with the cascade folded away.

When one rank dies the others fail too, within milliseconds, with errors about *it* (a closed
connection, an aborted communicator, a watchdog): these are counted, not shown.
"""

import math
import re
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hpcrun.diagnose.known import explained
from hpcrun.run.endings import Exit, Failure, Hang

_CASCADE = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|closed by (remote )?peer"
    r"|reset by peer|remote process (has )?exited|communicator was aborted|watchdog"
    r"|socket timeout|timed out waiting|wait timeout|DistNetworkError|DistStoreError"
    r"|failed to recv|connectFullMesh|Gloo.*(closed|timed? ?out)|^PeerFailed:",
    re.IGNORECASE,
)

# What srun and slurmstepd print on a task's end (srun(1), --kill-on-bad-exit).
_SRUN_TASK = re.compile(
    r"^srun: error: (?P<host>[^:\s]+): tasks? (?P<tasks>[\d,\-]+): (?P<what>.+)$", re.MULTILINE
)
_BY_DESCRIPTION = {signal.strsignal(number): number for number in signal.valid_signals()}
_SRUN_ERROR = re.compile(r"^srun: error: (?P<what>.+)$", re.MULTILINE)
# What slurmstepd prints when Slurm itself ends a job: "*** JOB 5 ON n1 CANCELLED AT … DUE TO …".
_ENDED = re.compile(
    r"\*\*\* (?P<what>JOB|STEP) \S+ ON \S+ CANCELLED AT \S+(?: DUE TO (?P<why>[A-Z ]+?))?"
    r"(?=,| \*\*\*)"
)
_WORDS = {
    "PREEMPTION": "preemption",
    "TIME LIMIT": "time-limit",
    "NODE FAILURE": "node-failure",
    # An administrator's, or somebody else's: ours comes when everything is settled.
    "JOB REQUEUE": "preemption",
}


@dataclass(frozen=True)
class Diagnosis:
    """The first cause in one line, the rank and host it points at, its step and its traceback.

    ``cascade`` counts the ranks whose failures only follow from it. ``hang``: nothing failed, but a
    watchdog ended ranks that made no progress. ``bad_input``: no other start would help.
    """

    line: str
    rank: int | None
    host: str | None
    step: int | None
    traceback: str | None
    cascade: int
    hang: bool = False
    bad_input: bool = False


# Our own, with advice; torch's; Python's.
_OUT_OF_MEMORY = ("OutOfMemory", "OutOfMemoryError", "MemoryError")
# Our own, of what a task gives or calls (a kernel, say), on whichever rank comes to it.
_BAD_INPUT = ("NotDeterministic", "NotTrainable")

# What points at the machine and not at the program.
_NODE_FAULT = re.compile(
    r"killed by SIG(KILL|BUS)|: Killed|Bus error|CUDA error: (uncorrectable|unspecified launch|hardware"
    r"|all CUDA-capable devices are busy|no CUDA-capable device)|ECC|NVML|Xid"
    r"|No CUDA GPUs are available|unhandled system error|Input/output error|Remote I/O error",
    re.IGNORECASE,
)


def blames_node(diagnosis: Diagnosis) -> bool:
    """Whether the first cause points at its node (hardware, memory, driver) and not at the program."""
    return diagnosis.host is not None and bool(_NODE_FAULT.search(diagnosis.line))


def is_cascade(failure: Failure) -> bool:
    """Whether the failure only says that somebody else has gone."""
    return bool(_CASCADE.search(f"{failure.kind}: {failure.message}"))


def scheduler_word(batch_log: str) -> str | None:
    """Slurm's own word for the end (preemption, time-limit, node-failure, cancelled), if it gave one.

    A step without a reason is not the scheduler's doing: srun ends one when a task fails.
    """
    for ended in _ENDED.finditer(batch_log):
        if ended["why"] in _WORDS:
            return _WORDS[ended["why"]]
        if ended["what"] == "JOB" and ended["why"] is None:
            return "cancelled"
    return None


def first_cause(
    failures: Sequence[Failure],
    exits: Sequence[Exit],
    batch_log: str = "",
    hang: Hang | None = None,
    last_words: Callable[[int], str | None] = lambda _: None,
) -> Diagnosis | None:
    """The earliest thing that went wrong by itself; None when nothing left a trace.

    Args:
        failures: the ranks' own records, earliest first.
        exits: the watcher's records, in the order seen.
        batch_log: what srun and slurmstepd printed for this attempt.
        hang: what the watchdogs left, if they ended it.
        last_words: what is in a rank's log of its end by a signal.
    """
    real = [failure for failure in failures if not is_cascade(failure)]
    killed = [ended for ended in exits if ended.signal is not None and not ended.induced]
    earlier = [failure.time for failure in real] + [ended.time for ended in killed]
    if hang is not None and hang.time < min(earlier, default=math.inf):
        # Ranks that fail after it were freed by the end of those that had hung.
        return Diagnosis(hang.line, hang.rank, hang.host, hang.step, None, 0, hang=True)
    if killed and (not real or killed[0].time <= real[0].time):
        first = killed[0]
        others = len({failure.rank for failure in failures} - {first.rank})
        return Diagnosis(
            f"rank {first.rank} on {first.host} was killed by {signal_name(first.signal)}"
            + _why(last_words(first.rank)),
            first.rank,
            first.host,
            _last_step(failures),
            None,
            others,
        )
    if real:
        return _from_failure(real[0], failures)
    told = _first_told(batch_log, {failure.rank for failure in failures})
    if told:
        rank = int(re.split(r"[,\-]", told["tasks"])[0])
        return Diagnosis(
            _told_by_srun(told["tasks"], told["host"], told["what"]) + _why(last_words(rank)),
            rank,
            told["host"],
            _last_step(failures),
            None,
            len(failures),
        )
    if failures:
        return _from_failure(failures[0], failures)
    launch = _SRUN_ERROR.search(batch_log)
    # srun returns 0 for tasks that it could not even launch.
    return Diagnosis(launch["what"], None, None, None, None, 0) if launch else None


def _first_told(batch_log: str, spoken: set[int]) -> "re.Match[str] | None":
    """srun's first line on a task that left no word of its own: the others' only follow from its end.

    Which line comes first is chance where a node's tasks end within one message to srun.
    """
    lines = list(_SRUN_TASK.finditer(batch_log))
    silent = (line for line in lines if not _tasks(line["tasks"]) <= spoken)
    return next(silent, lines[0] if lines else None)


def _tasks(text: str) -> set[int]:
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


def _told_by_srun(tasks: str, host: str, what: str) -> str:
    """srun's word for a signal is strsignal(3)'s: "Killed", "Segmentation fault (core dumped)"."""
    number = _BY_DESCRIPTION.get(what.removesuffix(" (core dumped)"))
    if number is None or not tasks.isdecimal():
        return f"task {tasks} on {host}: {what}"
    return f"rank {tasks} on {host} was killed by {signal_name(number)}"


def _why(words: str | None) -> str:
    return f": {explained(words) or words}" if words else ""


def signal_name(number: int | None) -> str:
    """``SIGKILL`` for 9; the number itself for one without a name."""
    try:
        return signal.Signals(number or 0).name
    except ValueError:
        return f"signal {number}"


def _from_failure(first: Failure, failures: Sequence[Failure]) -> Diagnosis:
    headline = first.message.strip().splitlines()[0] if first.message.strip() else "no message"
    at = f" at {first.where}" if first.where else ""
    kind = "out of memory" if first.kind in _OUT_OF_MEMORY else first.kind
    told = explained(first.message) or f"{headline}{at}"
    bad_input = first.kind in _BAD_INPUT
    return Diagnosis(
        f"rank {first.rank} on {first.host}: {told if bad_input else f'{kind}: {told}'}",
        first.rank,
        first.host,
        first.step,
        first.traceback,
        len({failure.rank for failure in failures} - {first.rank}),
        bad_input=bad_input,
    )


def _last_step(failures: Sequence[Failure]) -> int | None:
    steps = [failure.step for failure in failures if failure.step is not None]
    return max(steps, default=None)
