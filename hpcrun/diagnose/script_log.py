"""The last message of a script in the log of its task, also if torchrun started the script.

torchrun's own report comes last and has no reason. The message of the failed rank is before the
report, among those of ranks that only lost a peer.
"""

import re
from pathlib import Path

from hpcrun.diagnose.rank_logs import end_of_log, exception_line

LOG_ENDS = "; its log ends with: "
"""Text before the last line of a log without a traceback."""
_LONGEST = 200
# PyTorch puts this prefix before each line of a traceback once there is a process group.
_PREFIX = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)
_TRACEBACK = "Traceback (most recent call last):"
_AFTER = 30
"""Lines that a program may print at its exit, after the traceback that ends it."""
# Threads of gloo or CUDA may abort an interpreter that exits with an uncaught exception.
_ABORTED = re.compile(r"(?:ended with exit code \d+: its program )?was killed by SIG(ABRT|SEGV): ")
_NUMBER = re.compile(r"(?P<code>exit code \d+)|0x[0-9a-f]+|\d+")
# torch.distributed.elastic's log lines and its traceback: the text after them does not come from the ranks.
_AGENT = re.compile(
    r"^(?:[EWI]\d{4} .*torch/distributed/elastic/.*|Traceback \(most recent call last\):\n"
    r"(?=(?:  .*\n)*torch\.distributed\.elastic\.))",
    re.MULTILINE,
)
# torch.distributed.elastic.multiprocessing.errors.ChildFailedError, the part about the first failure.
_ROOT = re.compile(
    r"^Root Cause \(first observed failure\):\n(?:.*\n)*?\s+rank\s+: (?P<rank>\d+) \(local_rank: \d+\)\n"
    r"\s+exitcode\s+: (?P<code>-?\d+) ",
    re.MULTILINE,
)


def script_exception(log: Path) -> tuple[str, str]:
    """Return (exception of the last traceback, last line) of a script's log; "" for what is absent.

    For a script that torchrun has started, the exception has the rank that failed first.
    """
    text = end_of_log(log)
    root = None
    for found in _ROOT.finditer(text):
        root = found
    if root is None:
        plain = _PREFIX.sub("", text)
        raised = exception_line(plain) or ""
        # A traceback further up belongs to an error that the script handled.
        if raised and plain.rpartition(raised)[2].count("\n") > _AFTER:
            raised = ""
        return raised[:_LONGEST], _last_line(plain)
    rank = root["rank"]
    said = _AGENT.split(text[: root.start()], maxsplit=1)[0]
    prefix = f"[rank{rank}]: "
    own = "\n".join(
        line.removeprefix(prefix) for line in said.splitlines() if line.startswith(prefix)
    )
    words = exception_line(own) or exception_line(said) or f"exit code {root['code']}"
    return f"rank {rank}: {words}"[:_LONGEST], ""


def same_failure(words: str) -> str:
    """Return ``words`` about a failure without the parts that differ between two equal failures.

    These parts are the rank, numbers in the exception, an abort after the exception, and the last line of a
    log without a traceback.
    """
    words = re.sub(r": rank \d+: ", ": ", words.partition(LOG_ENDS)[0])
    words = _ABORTED.sub("ended with exit code 1: ", words)
    return _NUMBER.sub(lambda found: found["code"] or "0", words)


def _last_line(text: str) -> str:
    lines = (line.strip() for line in reversed(text.splitlines()))
    return next((line for line in lines if line), "")[:_LONGEST]
