"""The last message of a script in the log of its task, also if torchrun started the script.

torchrun's own report comes last and has no reason. The message of the failed rank is before the
report, among those of ranks that only lost a peer.
"""

import re
from pathlib import Path

from hpcrun.diagnose.rank_logs import end_of_log, exception_line

_LONGEST = 200
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


def script_words(log: Path) -> str:
    """Return the last line of a script, which in a traceback is the exception; "" if there is none.

    For a script that torchrun has started: the rank that failed first, and its exception.
    """
    text = end_of_log(log)
    root = None
    for found in _ROOT.finditer(text):
        root = found
    if root is None:
        return _last_line(text)
    rank = root["rank"]
    said = _AGENT.split(text[: root.start()], maxsplit=1)[0]
    # PyTorch puts this prefix before each line of a traceback once there is a process group.
    prefix = f"[rank{rank}]: "
    own = "\n".join(
        line.removeprefix(prefix) for line in said.splitlines() if line.startswith(prefix)
    )
    words = exception_line(own) or exception_line(said) or f"exit code {root['code']}"
    return f"rank {rank}: {words}"[:_LONGEST]


def _last_line(text: str) -> str:
    lines = (line.strip() for line in reversed(text.splitlines()))
    return next((line for line in lines if line), "")[:_LONGEST]
