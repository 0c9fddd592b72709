"""The error that ended a script, from its log: Python's traceback, torchrun's report, or the last line.

torchrun's own report comes last and has no reason. The message of the failed rank is before the
report, among those of ranks that only lost a peer.
"""

import re
from dataclasses import dataclass, field, replace
from pathlib import Path

from hpcrun.run.endings import deepest_own_place
from hpcrun.run.failures.log_end import end_of_log, exception_line

_LONGEST = 500
_LONGEST_LINE = 200
# PyTorch puts this prefix before each line of a traceback once there is a process group.
_PREFIX = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)
_TRACEBACK = "Traceback (most recent call last):"
_FOLLOWS = ("another exception occurred:", "direct cause of the following exception:")
_MOST_CHAINED = 20
_AFTER = 30
"""Lines that a program may print at its exit, after the traceback that ends it."""
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
_EXCEPTION = re.compile(r"(?P<name>[A-Za-z_][\w.]*)(?:: (?P<message>.*))?$", re.DOTALL)
# Python prints no traceback for a script that it cannot compile.
_UNREAD = re.compile(
    r'^  File "(?P<file>.+)", line (?P<line>\d+)\n(?:.*\n){0,4}?'
    r"(?P<raised>(?:SyntaxError|IndentationError|TabError): .+)$",
    re.MULTILINE,
)
# argparse, click, docopt and most shell scripts print the usage before they end with exit code 2.
_USAGE = re.compile(r"^\s*usage: ", re.MULTILINE | re.IGNORECASE)
_COMPLAINT = re.compile(r"^.*\berror: .+$", re.MULTILINE | re.IGNORECASE)
_USAGE_LINES = 60
_USAGE_CODE = 2


@dataclass(frozen=True)
class ScriptError:
    """The last error in the log of a script.

    Attributes:
        name: the type of the exception with its module, such as ``hpcrun.errors.UserError``; empty without a
            traceback.
        message: the first line of the exception's text.
        where: the deepest ``file:line`` of the traceback in the user's code.
        copy: the same line in the run's copy of the code, if the copy ran.
        traceback: the text of the traceback.
        before: the errors from which the exception follows, a line each, the newest first.
        last_line: the last line of the log.
        rank: the rank that failed first, if a launcher names it.
        code: the exit code of that rank.
        usage: the program printed how to call it, with its complaint in ``last_line``.
        quiet: the end of the log has no traceback, of this program or another.
    """

    name: str = ""
    message: str = ""
    where: str = ""
    copy: str = ""
    traceback: str = ""
    last_line: str = ""
    rank: int | None = None
    code: int | None = None
    usage: bool = False
    before: tuple[str, ...] = ()
    quiet: bool = field(default=False, compare=False)

    @property
    def kind(self) -> str:
        """The type of the exception without its module."""
        return self.name.rpartition(".")[2]

    @property
    def exception(self) -> str:
        """The exception as Python prints it, with the short name of its type; empty without a traceback."""
        return f"{self.kind}: {self.message}" if self.message else self.kind


def script_error(log: Path, code: int | None = None) -> ScriptError:
    """Return the last error in ``log``; all fields are empty for a log without a line.

    Args:
        log: the log of a rank.
        code: the exit code of the program.
    """
    text = end_of_log(log)
    root = None
    for found in _ROOT.finditer(text):
        root = found
    if root is None:
        return _of_program(_PREFIX.sub("", text), code)
    rank, failed = root["rank"], int(root["code"])
    said = _AGENT.split(text[: root.start()], maxsplit=1)[0]
    prefix = f"[rank{rank}]: "
    own = "\n".join(
        line.removeprefix(prefix) for line in said.splitlines() if line.startswith(prefix)
    )
    error = _of_program(own, failed)
    if not error.name:
        error = _of_program(_PREFIX.sub("", said), failed)
    return replace(error, rank=int(rank), code=failed)


def _of_program(text: str, code: int | None) -> ScriptError:
    last_line = _last_line(text)
    error = _raised(text)
    if error is not None:
        return replace(error, last_line=last_line)
    end = "\n".join(text.splitlines()[-_USAGE_LINES:])
    usage = _USAGE.search(end) if code == _USAGE_CODE else None
    if usage is not None:
        complaints = _COMPLAINT.findall(end)
        line = complaints[-1].strip()[:_LONGEST_LINE] if complaints else last_line
        return ScriptError(last_line=line, usage=True)
    return ScriptError(last_line=last_line, quiet=_TRACEBACK not in text)


def _raised(text: str) -> ScriptError | None:
    """Return the exception that ended the program; None if the text shows none."""
    raised = exception_line(text)
    found = raised and _EXCEPTION.match(raised)
    if not raised or not found:
        unread = None
        for compiled in _UNREAD.finditer(text):
            unread = compiled
        if unread is None or text[unread.end() :].count("\n") > _AFTER:
            return None
        name, _, message = unread["raised"].partition(": ")
        where, copy = deepest_own_place(unread[0])
        return ScriptError(name, message[:_LONGEST], where, copy, unread[0])
    # A traceback further up belongs to an error that the script handled.
    if text.rpartition(raised)[2].count("\n") > _AFTER:
        return None
    before, _, rest = text.rpartition(_TRACEBACK)
    trace = _TRACEBACK + rest[: rest.rindex(raised) + len(raised)]
    where, copy = deepest_own_place(trace)
    if found["name"].endswith("CalledProcessError") and not where and _TRACEBACK in before:
        # A launcher in Python reports the exit code of its program, and the program's traceback comes before.
        return _raised(before)
    message = (found["message"] or "")[:_LONGEST]
    return ScriptError(found["name"], message, where, copy, trace, before=_chained(before))


def _chained(before: str) -> tuple[str, ...]:
    """Return the exceptions that Python prints before one that follows from them, the newest first."""
    found: list[str] = []
    while before.rstrip().endswith(_FOLLOWS) and len(found) < _MOST_CHAINED:
        found.append((exception_line(before) or "")[:_LONGEST])
        before = before.rpartition(_TRACEBACK)[0]
    return tuple(found)


def _last_line(text: str) -> str:
    lines = (line.strip() for line in reversed(text.splitlines()))
    return next((line for line in lines if line), "")[:_LONGEST_LINE]
