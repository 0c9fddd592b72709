"""Slurm's notation of hosts, times and sizes.

Expanded here because a worker cannot rely on ``scontrol`` (containers rarely have it), and because a
wrong order puts the rendezvous on a host without rank 0. The reference is
``scontrol show hostnames``: hpcrun rejects what it rejects, and also malformed input that it accepts
(``n[1-``, ``n1]``, ``n[1-]``) and that Slurm never writes itself.
"""

import itertools
import re
import time

from hpcrun.errors import ClusterError

MAX_RANGE = 65536
"""Most hosts in one range (Slurm's MAX_RANGE, 64 Ki)."""

_NAME = re.compile(r"(?:[^][, \t\n]|\[[^][]*\])+")
_BALANCED = re.compile(r"(?:[^][]|\[[^][]*\])*")
_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")


def expand(expression: str) -> list[str]:
    """Return the host names of a host list expression, in Slurm's order, duplicates kept.

    Several brackets in one name are a product. Slurm runs through the last bracket fastest, then
    through the first, the second and so on: ``x[1-2]y[3-4]z[5-6]`` is x1y3z5, x1y3z6, x2y3z5,
    x2y3z6, x1y4z5 … (seen with ``scontrol show hostnames``, Slurm 22.05). A range is padded to the
    width of its first number. A name must end with its last bracket (slurm.conf(5), NodeName).

    Raises:
        ClusterError: the expression is empty or is not one that Slurm accepts.
    """
    hosts: list[str] = []
    for name in _split(expression):
        hosts += _expand_name(name, expression)
    if not hosts:
        raise ClusterError(
            "host list: it is empty; expected something like node[01-04] (is SLURM_JOB_NODELIST set?)"
        )
    return hosts


def _refuse(expression: str, problem: str) -> ClusterError:
    return ClusterError(
        f"host list {expression!r}: {problem}; compare with: scontrol show hostnames '{expression}'"
    )


def _split(expression: str) -> list[str]:
    """Split at separators outside brackets."""
    if not _BALANCED.fullmatch(expression):
        raise _refuse(expression, "its brackets do not match")
    return _NAME.findall(expression)


def _expand_name(name: str, expression: str) -> list[str]:
    """Expand one name with any number of brackets."""
    pieces = _BRACKETS.split(name)
    literals, ranges = pieces[::2], [_numbers(text, expression) for text in pieces[1::2]]
    if not ranges:
        return [name]
    if literals[-1]:
        raise _refuse(expression, f"{literals[-1]!r} follows the last bracket of {name!r}")
    # itertools.product varies its last argument fastest: reversing the leading brackets makes the
    # first bracket the fastest, and the last bracket of the name stays the innermost loop.
    hosts = []
    for leading in itertools.product(*reversed(ranges[:-1])):
        head = "".join(
            literal + number for literal, number in zip(literals, reversed(leading), strict=False)
        )
        hosts += [head + literals[-2] + number for number in ranges[-1]]
    return hosts


def _numbers(text: str, expression: str) -> list[str]:
    """Expand the inside of one bracket, such as ``1,03-05``, to its zero-padded numbers."""
    numbers: list[str] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise _refuse(expression, f"{part!r} in [{text}] is neither a number nor a range")
        first, last = match.group(1), match.group(2) or match.group(1)
        count = int(last) - int(first) + 1
        if count < 1:
            raise _refuse(expression, f"the range {part} runs backwards")
        if count > MAX_RANGE:
            raise _refuse(expression, f"the range {part} has more than {MAX_RANGE} hosts")
        numbers += [f"{n:0{len(first)}d}" for n in range(int(first), int(last) + 1)]
    return numbers


STEPS = "hpcrun-"
"""The beginning of the names of hpcrun's steps in a job; a user may start other steps there."""
AGENTS = f"{STEPS}agents"
"""The name of the step of a job's agents, one on each node."""

JOB_ID = re.compile(r"[0-9]+(?:[_+][0-9]+)?")


def unix_time(text: str) -> float | None:
    """Read a time as Slurm prints it: Unix seconds, or ISO in this machine's time zone.

    ``N/A``, ``NONE``, ``Unknown`` and the like are None.
    """
    text = text.strip()
    if text.isdecimal():
        return float(text)
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        return None


_DURATION = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)(?:\.\d+)?")


def seconds(text: str) -> int | None:
    """Read a duration ``D-HH:MM:SS``, also without its first parts; UNLIMITED and such: None."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        return None
    days, hours, minutes, rest = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + rest


def host_names(nodes: str) -> tuple[str, ...]:
    """Expand a node list; a job without nodes shows "", "None assigned" or "(null)"."""
    if nodes in ("", "None assigned", "(null)", "n/a"):
        return ()
    return tuple(expand(nodes))
